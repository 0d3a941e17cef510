"""Norm and core attention on plain torch: the `local` layers, for any device.

Megatron's own fallbacks refuse what training needs (sequence parallelism, packed sequences,
context parallelism). These two modules go through Megatron's ModuleSpec hooks, nothing is patched.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_dapo.device import install_cpu_support
from megatron_dapo.parallel.collectives import gather_sequence, zigzag_index

install_cpu_support()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; its weight is whole on every tensor rank."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each tensor rank sees its own tokens: Megatron sums these gradients over the tp_group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape; statistics are taken in fp32."""
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """Megatron's description of the weight for a distributed checkpoint."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)


class PackedAttention(nn.Module):
    """Causal attention over packed sequences: one scaled_dot_product_attention per sequence.

    No token sees another sequence and none is spent on padding a batch. Under context
    parallelism each rank holds two chunks of every sequence (`zigzag_index`), gathers keys and
    values over the cp_group, and masks by position.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection,
        **_unused: object,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: PackedSeqParams,
        **_unused: object,
    ) -> Tensor:
        """[tokens, heads * head_dim].

        Args:
            query: [tokens, heads, head_dim], this context rank's tokens. Carries gradient.
            key: [tokens, query groups, head_dim]. Carries gradient.
            value: as `key`.
            attention_mask: unused; the mask is causal inside each sequence.
            packed_seq_params: boundaries of the whole pack, over all context ranks.
        """
        boundaries = packed_seq_params.cu_seqlens_q
        if self.cp_group.size() == 1:
            bounds = boundaries.tolist()
            outputs = [
                _attend(query[start:end], key[start:end], value[start:end], None, self.scale)
                for start, end in pairwise(bounds)
                if end > start
            ]
        else:
            outputs = self._context_parallel(query, key, value, boundaries)
        return torch.cat(outputs).flatten(1)

    def _context_parallel(
        self, query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor
    ) -> list[Tensor]:
        """Attention of this rank's queries over the keys of all, one tensor a sequence."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        index = zigzag_index(boundaries, size).to(query.device)  # [ranks, tokens]
        order = index.flatten().argsort()  # back from rank order to the order of the pack
        keys = gather_sequence(key, self.cp_group).index_select(0, order)
        values = gather_sequence(value, self.cp_group).index_select(0, order)
        outputs = []
        bounds = boundaries.tolist()
        for start, end in pairwise(bounds):
            mine = slice(start // size, end // size)
            positions = torch.arange(start, end, device=query.device)
            visible = index[rank, mine, None] >= positions  # [queries, keys]
            outputs.append(
                _attend(query[mine], keys[start:end], values[start:end], visible, self.scale)
            )
        return outputs


def _attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None
) -> Tensor:
    """[queries, heads, head_dim] of one sequence; `visible` None means plainly causal."""
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
        enable_gqa=key.size(1) != query.size(1),
    )
    return output[0].transpose(0, 1)
