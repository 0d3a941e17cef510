"""The output layer in blocks of rows: logits of a block, and what its gradient adds up to.

Logits of all tokens never exist. With tensor parallelism each rank multiplies by its own rows of
the weight; with sequence parallelism the hidden states are gathered first and their gradient is
scattered last, as Megatron's column-parallel layer does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.loss.shards import check_chunk_tokens, compute_dtype

CPU_ROWS, GPU_ROWS = 256, 1024
"""Most rows of a block: enough for the matrix products to run at full rate."""
TILE_ROWS = 4096
"""Rows of the weight whose gradient is converted to fp32 at a time, on CPU."""


class HeadBlocks:
    """Blocks of hidden [tokens, hidden] @ weight [vocab / tp, hidden]^T.

    Every rank of `tp_group` builds one. Communicates: with sequence parallelism, one all-gather
    of the hidden states; in `gradients`, one all-reduce or reduce-scatter of their gradient.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        tp_group: dist.ProcessGroup | None,
        sequence_parallel: bool,
        chunk_tokens: int | None,
    ) -> None:
        several = tp_group is not None and dist.get_world_size(tp_group) > 1
        self._group = tp_group if several else None
        self._scatters = sequence_parallel and several
        self._weight = weight.detach()
        self._hidden = hidden.detach()
        if self._scatters:
            self._hidden = _gather_rows(self._hidden, tp_group)
        tokens = self._hidden.shape[0]
        rows = check_chunk_tokens(chunk_tokens) or default_head_rows(tokens, hidden)
        self._rows = max(1, min(rows, tokens))
        shape = (self._rows, weight.shape[0])
        self._logits = hidden.new_empty(shape, dtype=block_dtype(hidden))
        narrow = self._logits.dtype != hidden.dtype
        self._grad_logits = hidden.new_empty(shape) if narrow else self._logits
        self._grad_hidden: Tensor | None = None
        self._grad_weight: Tensor | None = None

    def blocks(self) -> list[slice]:
        total = self._hidden.shape[0]
        return [slice(i, min(i + self._rows, total)) for i in range(0, max(total, 1), self._rows)]

    def logits(self, rows: slice) -> Tensor:
        """[rows, vocab / tp] in `block_dtype`, valid until the next call."""
        hidden = self._hidden[rows]
        out = self._logits[: hidden.shape[0]]
        if out.dtype == hidden.dtype:
            return torch.mm(hidden, self._weight.t(), out=out)
        return torch.mm(hidden, self._weight.t(), out_dtype=out.dtype, out=out)

    def gradient_of(self, rows: slice, logits: Tensor) -> Tensor:
        """Where d loss / d logits of a block goes: the logits' own memory if it has the dtype of
        the factors of the products to come, that of the hidden states."""
        return self._grad_logits[: logits.shape[0]]

    def start_gradient(
        self, *, hidden: bool, weight: bool, accumulator: Tensor | None = None
    ) -> None:
        """Ask for the gradient of the hidden states, the weight, or both.

        Args:
            accumulator: fp32 [vocab / tp, hidden] that the weight's gradient is added to; None:
                a new one.
        """
        if hidden:
            self._grad_hidden = torch.empty_like(self._hidden)
        if weight:
            dtype = torch.promote_types(self._weight.dtype, torch.float32)
            new = accumulator is None
            self._grad_weight = torch.zeros_like(self._weight, dtype=dtype) if new else accumulator

    def add_gradient(self, rows: slice, grad_logits: Tensor, active: Tensor) -> None:
        """Take in d loss / d logits of one block.

        Args:
            grad_logits: [rows, vocab / tp], 0 in rows that are not active.
            active: [rows] bool; False: the row adds nothing, whatever its hidden state holds.
        """
        if self._grad_hidden is not None:
            torch.mm(grad_logits, self._weight, out=self._grad_hidden[rows])
        if self._grad_weight is not None:
            hidden = self._hidden[rows]
            if not (active.is_cpu and bool(active.all())):
                hidden = torch.where(active[:, None], hidden, 0.0)
            _add_product(self._grad_weight, grad_logits, hidden)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradient of the hidden states as they were given, and of the weight in fp32."""
        grad_hidden = self._grad_hidden
        if grad_hidden is not None and self._group is not None:
            if self._scatters:
                grad_hidden = _scatter_rows(grad_hidden, self._group)
            else:
                dist.all_reduce(grad_hidden, group=self._group)
        return grad_hidden, self._grad_weight


def deliver_weight_gradient(
    grad: Tensor, weight: Tensor, main_grad: Tensor | None
) -> Tensor | None:
    """What backward returns for the weight, given its fp32 gradient.

    With `main_grad` the gradient is there already: Megatron reads `weight.grad_added_to_main_grad`,
    and autograd gets nothing, neither memory nor a sum with the gradient of an embedding that
    shares the weight.
    """
    if main_grad is None:
        return grad.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None


def check_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tp_group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    main_grad: Tensor | None,
) -> None:
    """Raises ValueError unless hidden, weight, targets and main_grad fit together."""
    parts = dist.get_world_size(tp_group) if tp_group is not None and sequence_parallel else 1
    tokens = hidden.shape[0] * parts
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: need [tokens, "
            "hidden] and [vocab / tp, hidden]; flatten [seq, batch] first"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}: need one floating-point "
            "dtype, they are factors of one product"
        )
    if targets.shape != (tokens,):
        raise ValueError(
            f"targets {tuple(targets.shape)}: need ({tokens},), a label for each row of hidden"
            + (f" of all {parts} ranks (sequence_parallel)" if parts > 1 else "")
        )
    if main_grad is not None and (main_grad.shape, main_grad.dtype) != (
        weight.shape,
        torch.float32,
    ):
        raise ValueError(
            f"main_grad is {main_grad.dtype} {tuple(main_grad.shape)}: need float32 "
            f"{tuple(weight.shape)} like the weight"
        )


def block_dtype(hidden: Tensor) -> torch.dtype:
    """Of a block's logits: fp32 where a product of bf16 factors can put its fp32 sums out as they
    are, on CUDA; on CPU the dtype of the hidden states."""
    return hidden.dtype if hidden.is_cpu else compute_dtype(hidden.dtype)


def default_head_rows(tokens: int, hidden: Tensor) -> int:
    """Rows of a block; on CPU a block stays below a sixteenth of fp32 logits, from 128 rows on
    (bf16: half of both), since its fp32 scratch does not shrink with it."""
    if not hidden.is_cpu:
        return GPU_ROWS
    return min(max(tokens // 64, 32) * hidden.dtype.itemsize, CPU_ROWS)


def _add_product(accumulator: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """accumulator += grad_logits^T @ hidden with fp32 sums, whatever the factors' dtype."""
    if grad_logits.dtype == accumulator.dtype:
        accumulator.addmm_(grad_logits.t(), hidden)
    elif grad_logits.is_cpu:
        wide = hidden.to(accumulator.dtype)
        for tile, grads in zip(
            accumulator.split(TILE_ROWS), grad_logits.split(TILE_ROWS, dim=1), strict=True
        ):
            tile.addmm_(grads.to(accumulator.dtype).t(), wide)
    else:
        torch.addmm(
            accumulator, grad_logits.t(), hidden, out_dtype=accumulator.dtype, out=accumulator
        )


def _gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    tokens, width = rows.shape
    gathered = rows.new_empty((dist.get_world_size(group) * tokens, width))
    dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
    return gathered


def _scatter_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    mine = rows.new_empty((rows.shape[0] // dist.get_world_size(group), rows.shape[1]))
    dist.reduce_scatter_tensor(mine, rows, group=group)
    return mine
