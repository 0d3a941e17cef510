"""The policy as vLLM's `WeightSource`: what its own trainer-side engines send.

Two ways to hand weights over. `PolicySource` yields full Hugging Face tensors, on global rank 0
(nccl) or on every rank (ipc). `PolicyShards` yields what each rank holds, with its place in the
mesh of ranks (nccl_m2n), so that nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.m2n_common import (
    REPLICATE,
    REPLICATED,
    M2NMesh,
    M2NParamMeta,
    Placements,
)
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.resharding.cuts import unfuse
from megatron_dapo.resharding.layout import find_layout, local_parameters
from megatron_dapo.resharding.name_map import Entry, family_for
from megatron_dapo.resharding.quantize import E4M3, SCALE_SUFFIX, quantized, scales_shape
from megatron_dapo.resharding.train_map import blocks
from megatron_dapo.resharding.transfer import DESTINATION, export_stream

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class PolicySource(WeightSource):
    """Full Hugging Face tensors, in the order of an exported folder.

    Every rank makes one and iterates it at the same time, as often as it likes; each pass reads the
    parameters as they are then, so no optimizer step may run before it has ended. No gradient.

    Args:
        chunks: this rank's model chunks, unwrapped.
        dtype: of the tensors; with `in_fp8` of those that are not converted.
        bucket_bytes: full tensors under way at a time; a rank holds at most two buckets.
        in_fp8: names of the tensors that the engine keeps in e4m3. The matrices among them come
            as values, each followed by its scales.
        everywhere: every rank yields the tensors, after rank 0 has broadcast them; else rank 0
            yields them and the others, which hold no full tensor, yield nothing.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        hf_config: PretrainedConfig,
        parallel: ParallelContext,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        in_fp8: Collection[str] = (),
        everywhere: bool = False,
    ) -> None:
        self._chunks, self._hf_config, self._parallel = chunks, hf_config, parallel
        self._dtype, self._bucket_bytes = dtype, bucket_bytes
        self._everywhere = everywhere
        self._tensors = family_for(hf_config).hf_tensors
        self._in_fp8 = frozenset(name for name in in_fp8 if len(self._tensors[name]) == 2)

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of every tensor of the whole model, in order. Local."""
        found = []
        for name, shape in self._tensors.items():
            if name not in self._in_fp8:
                found.append(ParamMeta(name, self._dtype, shape))
                continue
            rows, cols = shape
            found.append(ParamMeta(name, E4M3, shape))
            found.append(ParamMeta(name + SCALE_SUFFIX, torch.float32, scales_shape((rows, cols))))
        return found

    def held_names(self) -> Collection[str] | None:
        """Of rank 0, or of every rank with `everywhere`: all (None). Else none."""
        return None if self._yields else frozenset()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """A fresh pass, in the order of `metadata`. Collective over the world group."""
        stream = export_stream(
            self._chunks,
            self._hf_config,
            self._parallel,
            bucket_bytes=self._bucket_bytes,
            dtype=self._dtype,
            everywhere=self._everywhere,
        )
        for name, tensor in stream:
            if name in self._in_fp8:
                yield from quantized([(name, tensor)])
            else:
                yield name, tensor

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """One batch a layer. A rank that yields nothing still takes part until the end."""
        if self._yields:
            yield from super().iter_groups()
        else:
            for name, _ in self:
                raise RuntimeError(f"rank {self._parallel.rank} yields {name!r}, which it has not")

    @property
    def _yields(self) -> bool:
        return self._everywhere or self._parallel.rank == DESTINATION


class PolicyShards(M2NWeightSource):
    """Each rank's part of every Hugging Face tensor, cut out of Megatron's fused parameters.

    The mesh is (context x data replicas) x tensor ranks, which is the order of the global ranks.
    Embedding and head whose rows were padded do not divide as they do without padding: they are
    gathered within the tensor group and declared replicated.

    Every rank makes one. Parameters are read while iterating. No gradient.

    Args:
        chunks: this rank's model chunks, unwrapped.
        dtype: of the tensors.

    Raises:
        ValueError: a layout whose shards have no place in one mesh; the message names it.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        hf_config: PretrainedConfig,
        parallel: ParallelContext,
        *,
        dtype: torch.dtype,
    ) -> None:
        _check_one_mesh(parallel)
        self._dtype, self._parallel = dtype, parallel
        self._family = family_for(hf_config)
        self._parameters = local_parameters(chunks, self._family, parallel)
        self._layout = find_layout(self._parameters, parallel, len(chunks))
        self._entries = [entry for entry in self._family.entries if entry.rule.exported]

    def mesh(self) -> M2NMesh:
        """Replicas by tensor ranks."""
        tensor = self._parallel.tp_size
        return M2NMesh((self._parallel.world_size // tensor, tensor), 0)

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype, full shape and placement of every tensor, in order. Local."""
        return [
            M2NParamMeta(tensor.name, self._dtype, tensor.shape, self._placements(entry))
            for entry in self._entries
            for tensor in entry.hf
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of each tensor. The tensor group gathers what is padded."""
        for entry in self._entries:
            parameter = self._parameters[entry].detach()
            if self._gathered(entry):
                yield entry.key, self._gather(entry, parameter)
                continue
            shards = self._layout.shards(entry.rule)
            dim = entry.rule.cut.dim
            rows = [tensor.shape[0] // (shards if dim == 0 else 1) for tensor in entry.hf]
            pieces = unfuse(parameter, rows, blocks(entry.rule, self._family, shards))
            for tensor, piece, count in zip(entry.hf, pieces, rows, strict=True):
                yield tensor.name, piece[:count].to(self._dtype).contiguous()

    def _placements(self, entry: Entry) -> Placements | None:
        if self._layout.shards(entry.rule) == 1 or self._gathered(entry):
            return REPLICATED
        assert entry.rule.cut.dim is not None, f"{entry.key} is cut along no dimension"
        return REPLICATE, entry.rule.cut.dim

    def _gathered(self, entry: Entry) -> bool:
        padded = entry.rule.cut.padded and self._layout.shards(entry.rule) > 1
        return padded and self._layout.padded_vocab_size != self._family.vocab_size

    def _gather(self, entry: Entry, shard: Tensor) -> Tensor:
        mine = shard.to(self._dtype).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self._parallel.tp_size)]
        dist.all_gather(parts, mine, group=self._parallel.tp_group)
        return torch.cat(parts)[: entry.hf[0].shape[0]].contiguous()


def _check_one_mesh(parallel: ParallelContext) -> None:
    problem = None
    if parallel.pp_size > 1:
        problem = f"parallel.pipeline={parallel.pp_size}: a rank holds some layers only"
    elif parallel.ep_size > 1:
        problem = f"parallel.expert={parallel.ep_size}: a rank holds some experts only"
    elif parallel.etp_size not in (1, parallel.tp_size):
        problem = (
            f"parallel.expert_tensor={parallel.etp_size}: experts would need another mesh than "
            f"the tensor ranks, {parallel.tp_size}; only that or 1 fits"
        )
    if problem is not None:
        raise ValueError(
            f"{problem}. resharding.transport=vllm_nccl_m2n describes all ranks by one mesh of "
            "(context x data) x tensor; use vllm_nccl or nccl"
        )
