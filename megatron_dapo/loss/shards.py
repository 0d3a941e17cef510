"""One rank's columns of the vocabulary: statistics of a row block, their merge, the gradient.

Everything below works on a block of rows that stays in cache, in fp32 whatever the logits'
dtype. Names in this file, for one row with logits z, temperature T and d_v = (z_v - m) / T:

    peak      m = max z
    sumexp    s = sum exp(d)
    weighted  q = sum d exp(d)
    target    u = d_y              on the rank that owns label y, else 0

so that logprob = u - log s and entropy = log s - q / s, both free of the logits' offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.types import NO_LABEL

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""fp32 size of one row block: what a cache holds, or what keeps a GPU busy."""
FLOOR = -110.0
"""exp(FLOOR) is 0 in fp32: shifted logits stop here, so that 0 * -inf never arises."""


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary this rank's logits hold."""

    width: int
    """Columns of this rank, padding included; the same on every rank of the group."""
    columns: int
    """Leading columns that are real tokens; the rest never takes part."""
    first: int
    """Token id of column 0."""
    vocab_size: int
    """Real tokens over all ranks; labels lie below it."""
    tp_group: dist.ProcessGroup | None

    @classmethod
    def of(
        cls, width: int, tp_group: dist.ProcessGroup | None, real_vocab_size: int | None
    ) -> VocabShard:
        size = 1 if tp_group is None else dist.get_world_size(tp_group)
        rank = 0 if tp_group is None else dist.get_rank(tp_group)
        vocab_size = width * size if real_vocab_size is None else real_vocab_size
        if not 0 < vocab_size <= width * size:
            raise ValueError(
                f"real_vocab_size={vocab_size} with {size} shards of {width} columns: need "
                f"1 .. {width * size}; pass the vocab_size of the model's config.json"
            )
        columns = min(max(vocab_size - rank * width, 0), width)
        return cls(width, columns, rank * width, vocab_size, tp_group if size > 1 else None)


class RowStatistics(NamedTuple):
    """Global statistics of rows, each [rows]; identical on every rank of the group."""

    logprobs: Tensor  # 0 without a label
    entropy: Tensor | None  # 0 without a label
    peak: Tensor
    sumexp: Tensor


class RowGradient(NamedTuple):
    """d loss / d logits of rows: exp(d) * (scale + slope * d), plus target; each [rows]."""

    peak: Tensor
    scale: Tensor
    slope: Tensor | None  # only where the entropy carries gradient
    target: Tensor  # added in the label's column

    def block(self, rows: slice) -> RowGradient:
        slope = None if self.slope is None else self.slope[rows]
        return RowGradient(self.peak[rows], self.scale[rows], slope, self.target[rows])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or float64 for float64 logits (tests)."""
    return torch.promote_types(dtype, torch.float32)


def block_rows(tokens: int, width: int, device: torch.device, chunk_tokens: int | None) -> int:
    """Rows of one block: `chunk_tokens`, or as many as fit BLOCK_BYTES."""
    if chunk_tokens is not None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens}: need at least 1, or None")
        return chunk_tokens
    return max(1, min(tokens, BLOCK_BYTES.get(device.type, BLOCK_BYTES["cuda"]) // (4 * width)))


class Scratch:
    """Two reusable fp32 blocks."""

    def __init__(self, rows: int, width: int, like: Tensor) -> None:
        self._shape = (rows, width)
        self._like = like
        self._blocks: dict[str, Tensor] = {}

    def block(self, name: str, rows: int, columns: int) -> Tensor:
        """[rows, columns] of the block called `name`, allocated at first use."""
        if name not in self._blocks:
            dtype = compute_dtype(self._like.dtype)
            self._blocks[name] = self._like.new_empty(self._shape, dtype=dtype)
        return self._blocks[name][:rows, :columns]


def check_labels(labels: Tensor, shard: VocabShard) -> None:
    """Raises ValueError for a label that is no real token; on a device no one waits for that,
    and `merge_statistics` makes such a log-prob NaN instead."""
    if not labels.is_cpu or labels.numel() == 0:
        return
    wrong = (labels != NO_LABEL) & ((labels < 0) | (labels >= shard.vocab_size))
    if wrong.any():
        raise ValueError(
            f"targets holds {labels[wrong][0].item()}: need 0 .. {shard.vocab_size - 1}, or "
            f"{NO_LABEL} for a position without label; was the right real_vocab_size given?"
        )


def block_statistics(
    logits: Tensor,
    labels: Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    with_entropy: bool,
    scratch: Scratch,
) -> Tensor:
    """This rank's (peak, sumexp, weighted, target) of one block, [4, rows].

    Leaves exp(d) of the real columns in the scratch block "exp".

    Args:
        logits: [rows, width] any float dtype, read once.
        labels: [rows] int64 token ids or NO_LABEL.
    """
    rows, columns = labels.numel(), shard.columns
    dtype = compute_dtype(logits.dtype)
    if columns == 0:
        nothing = logits.new_zeros((4, rows), dtype=dtype)
        nothing[0] = torch.finfo(dtype).min
        return nothing
    shifted = scratch.block("shifted" if with_entropy else "exp", rows, columns)
    real = logits[:, :columns]
    values = real if logits.dtype == dtype else shifted.copy_(real)
    peak = values.amax(-1).clamp_(min=torch.finfo(dtype).min)
    _shift(values, peak, temperature, out=shifted)
    index, owned = _columns_of(labels, shard)
    target = torch.where(owned, shifted.gather(1, index[:, None])[:, 0], 0.0)
    if not with_entropy:
        sumexp = shifted.exp_().sum(-1)
        return torch.stack([peak, sumexp, torch.zeros_like(peak), target])
    shifted.clamp_(min=FLOOR)
    exp = torch.exp(shifted, out=scratch.block("exp", rows, columns))
    return torch.stack([peak, exp.sum(-1), torch.linalg.vecdot(exp, shifted), target])


def merge_statistics(
    local: Tensor, labels: Tensor, shard: VocabShard, *, temperature: float, with_entropy: bool
) -> RowStatistics:
    """Statistics over all ranks from each rank's [4, rows].

    Every rank of the shard's tp_group calls. Communicates: one all-gather of 4 floats a row.
    """
    if shard.tp_group is None:
        peak, sumexp, weighted, target = local.unbind(0)
    else:
        size = dist.get_world_size(shard.tp_group)
        gathered = local.new_empty((size, *local.shape))
        dist.all_gather(list(gathered.unbind(0)), local.contiguous(), group=shard.tp_group)
        peaks, sums, weights, targets = gathered.unbind(1)
        peak = peaks.amax(0)
        drop = ((peaks - peak) / temperature).clamp_(min=torch.finfo(local.dtype).min)
        factor = drop.exp()
        sumexp = (factor * sums).sum(0)
        weighted = (factor * (weights + drop * sums)).sum(0)
        owner = labels.div(shard.width, rounding_mode="floor").clamp(0, size - 1)
        target = (targets + drop).gather(0, owner[None])[0]
    log_sum = sumexp.log()
    known = (labels >= 0) & (labels < shard.vocab_size)
    logprobs = torch.where(known, target - log_sum, torch.nan)
    keep = labels != NO_LABEL
    entropy = torch.where(keep, log_sum - weighted / sumexp, 0.0) if with_entropy else None
    return RowStatistics(torch.where(keep, logprobs, 0.0), entropy, peak, sumexp)


def row_gradient(
    labels: Tensor,
    peak: Tensor,
    sumexp: Tensor,
    entropy: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    temperature: float,
) -> RowGradient:
    """Coefficients of d loss / d logits of rows, from the gradients of logprobs and entropy.

    dz_v = [g (1{v = y} - p_v) - h p_v (log p_v + H)] / T, with p = exp(d) / sumexp.
    """
    keep = labels != NO_LABEL
    share = torch.where(keep, 1.0 / (sumexp * temperature), 0.0)
    g = torch.zeros_like(peak) if grad_logprobs is None else torch.where(keep, grad_logprobs, 0.0)
    if grad_entropy is None or entropy is None:
        return RowGradient(peak, -g * share, None, g / temperature)
    h = torch.where(keep, grad_entropy, 0.0)
    offset = torch.where(keep, entropy - sumexp.log(), 0.0)
    return RowGradient(peak, -(g + h * offset) * share, -h * share, g / temperature)


def write_gradient(
    logits: Tensor,
    labels: Tensor,
    gradient: RowGradient,
    shard: VocabShard,
    *,
    temperature: float,
    scratch: Scratch,
    out: Tensor,
) -> None:
    """Write d loss / d logits of one block into `out`, [rows, width]; `out` may be `logits`.

    exp is computed anew. Padded columns and rows without a label get exactly zero.
    """
    rows, columns = labels.numel(), shard.columns
    dtype = compute_dtype(logits.dtype)
    out[:, columns:].zero_()
    if columns == 0:
        return
    real = out[:, :columns]
    result = real if out.dtype == dtype else scratch.block("exp", rows, columns)
    values = logits[:, :columns]
    if logits.dtype != dtype:
        values = result.copy_(values)
    if gradient.slope is None:
        _shift(values, gradient.peak, temperature, out=result)
        result.exp_().mul_(gradient.scale[:, None])
    else:
        shifted = scratch.block("shifted", rows, columns)
        _shift(values, gradient.peak, temperature, out=shifted).clamp_(min=FLOOR)
        torch.exp(shifted, out=result)
        result.mul_(shifted.mul_(gradient.slope[:, None]).add_(gradient.scale[:, None]))
    finish_gradient(result, labels, gradient.target, shard)
    if result is not real:
        real.copy_(result)


def finish_gradient(block: Tensor, labels: Tensor, target: Tensor, shard: VocabShard) -> None:
    """Add the label's column and clear rows without a label, in place, [rows, columns]."""
    index, owned = _columns_of(labels, shard)
    block.scatter_add_(1, index[:, None], torch.where(owned, target, 0.0)[:, None])
    ignored = labels == NO_LABEL
    if block.is_cpu:  # touch only those rows; on a device finding them would wait for it
        block.index_fill_(0, ignored.nonzero()[:, 0], 0.0)
    else:
        block.masked_fill_(ignored[:, None], 0.0)


def _shift(values: Tensor, peak: Tensor, temperature: float, *, out: Tensor) -> Tensor:
    """d = (values - peak) / temperature into `out`, which may be `values`."""
    torch.sub(values, peak[:, None], out=out)
    return out if temperature == 1.0 else out.div_(temperature)


def _columns_of(labels: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Column of each label (clamped into range) and whether this rank owns it, both [rows]."""
    local = labels - shard.first
    owned = (local >= 0) & (local < shard.columns)
    return local.clamp(0, shard.columns - 1), owned
