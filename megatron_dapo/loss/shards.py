"""Softmax over a vocabulary that ranks share: statistics of rows, their merge, the gradient.

A visit walks over a rank's logits [rows, width] in blocks of rows that stay in cache, in fp32
whatever the logits' dtype. Powers of two are several times cheaper than exp on CPU, so with
c = log2(e) / temperature, for a row with logits z:

    peak      k = c max z
    shifted   d = c z - k            one fused multiply-add: an offset of the logits costs nothing
    sumexp    s = sum 2^d
    weighted  q = sum d 2^d
    target    u = d_y                on the rank that owns label y, else 0

and in nats logprob = u ln 2 - ln s, entropy = ln s - q ln 2 / s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.loss.device_kernels import device_kernels
from megatron_dapo.types import NO_LABEL

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""fp32 size of a block: what a core's cache holds, or what keeps a GPU busy."""
FLOOR = -160.0
"""2^FLOOR is 0 in fp32: d stops here, so that 0 * -inf never arises."""
WILD = 2.0**30
"""From this peak on the rounding of k alone moves d by more than exp2 can hold."""
LN2 = math.log(2.0)


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
    """Ranks that share the vocabulary; None: this rank holds all of it."""

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

    def columns_of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label (clamped into range), and whether this rank owns it."""
        local = labels - self.first
        owned = (local >= 0) & (local < self.columns)
        return local.clamp(0, max(self.columns - 1, 0)), owned

    def check_labels(self, labels: Tensor) -> None:
        """Raises ValueError for labels that are not int64, and for one that is no real token where
        looking costs no wait: on CPU. On a device such a label makes its log-prob NaN."""
        if labels.dtype != torch.int64:
            raise ValueError(f"targets are {labels.dtype}: need int64 token ids; call .long()")
        if not labels.is_cpu or labels.numel() == 0:
            return
        wrong = (labels != NO_LABEL) & ((labels < 0) | (labels >= self.vocab_size))
        if wrong.any():
            raise ValueError(
                f"targets holds {labels[wrong][0].item()}: need 0 .. {self.vocab_size - 1}, or "
                f"{NO_LABEL} for a position without label; was the right real_vocab_size given?"
            )


class RowStatistics(NamedTuple):
    """Statistics over the whole vocabulary, each [rows]; the same on every rank of the group."""

    logprobs: Tensor  # 0 without a label
    entropy: Tensor | None  # 0 without a label
    peak: Tensor
    sumexp: Tensor


class RowGradient(NamedTuple):
    """d loss / d logits of rows: 2^d * (scale + slope * d), plus target; each [rows]."""

    active: Tensor  # bool, False: the row's gradient is 0, whatever its logits hold
    peak: Tensor
    scale: Tensor
    slope: Tensor | None  # only where the entropy carries gradient
    target: Tensor  # added in the label's column

    def block(self, rows: slice) -> RowGradient:
        slope = None if self.slope is None else self.slope[rows]
        return RowGradient(
            self.active[rows], self.peak[rows], self.scale[rows], slope, self.target[rows]
        )


class RowVisitor:
    """Visits rows of one rank's logits block by block; owns the blocks' scratch memory."""

    def __init__(
        self,
        shard: VocabShard,
        *,
        temperature: float,
        with_entropy: bool,
        chunk_tokens: int | None = None,
    ) -> None:
        if not temperature > 0:
            raise ValueError(
                f"temperature={temperature}: need > 0; greedy sampling has no log-probs to train on"
            )
        self.shard = shard
        self.temperature = temperature
        self._c = 1.0 / (LN2 * temperature)
        self.with_entropy = with_entropy
        self._chunk_tokens = check_chunk_tokens(chunk_tokens)
        self._scratch: dict[str, Tensor] = {}

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """This rank's (peak, sumexp, weighted, target), [4, rows]; one read of the logits.

        Args:
            logits: [rows, width] any float dtype.
            labels: [rows] int64 token ids or NO_LABEL.
        """
        dtype = compute_dtype(logits.dtype)
        local = logits.new_zeros((4, labels.numel()), dtype=dtype)
        if self.shard.columns == 0:
            local[0] = torch.finfo(dtype).min
            return local
        if kernels := device_kernels(logits):
            kernels.row_statistics(
                logits, labels, self.shard, c=self._c, with_entropy=self.with_entropy, out=local
            )
            return local
        index, owned = self.shard.columns_of(labels)
        for rows in self._blocks(logits):
            real = logits[rows, : self.shard.columns]
            self._block_statistics(real, index[rows, None], local[:, rows])
        local[3] = torch.where(owned, local[3], 0.0)
        return local

    def merge(self, local: Tensor, labels: Tensor) -> RowStatistics:
        """Statistics over all ranks from each rank's [4, rows].

        Every rank of the shard's tp_group calls. Communicates: one all-gather of 4 floats a row.
        """
        if self.shard.tp_group is None:
            peak, sumexp, weighted, target = local.unbind(0)
        else:
            size = dist.get_world_size(self.shard.tp_group)
            gathered = local.new_empty((size, *local.shape))
            dist.all_gather(list(gathered.unbind(0)), local, group=self.shard.tp_group)
            peaks, sums, weights, targets = gathered.unbind(1)
            peak = peaks.amax(0)
            drop = (peaks - peak).clamp_(min=torch.finfo(local.dtype).min)
            factor = drop.exp2()
            sumexp = (factor * sums).sum(0)
            moved = torch.where(factor == 0, 0.0, factor * (weights + drop * sums))
            weighted = moved.sum(0)
            owner = labels.div(self.shard.width, rounding_mode="floor").clamp(0, size - 1)
            target = (targets + drop).gather(0, owner[None])[0]
        log_sum = sumexp.log()
        keep = labels != NO_LABEL
        known = (labels >= 0) & (labels < self.shard.vocab_size)
        logprobs = torch.where(keep, torch.where(known, target * LN2 - log_sum, torch.nan), 0.0)
        entropy = None
        if self.with_entropy:
            entropy = torch.where(keep, log_sum - weighted * LN2 / sumexp, 0.0)
        return RowStatistics(logprobs, entropy, peak, sumexp)

    def gradient(
        self,
        labels: Tensor,
        peak: Tensor,
        sumexp: Tensor,
        entropy: Tensor | None,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> RowGradient:
        """Coefficients of d loss / d logits from the gradients of logprobs and entropy.

        dz_v = [g (1{v = y} - p_v) - h p_v (log p_v + H)] / T, with p = 2^d / sumexp.
        """
        zero = torch.zeros_like(peak)
        g = zero if grad_logprobs is None else grad_logprobs
        h = zero if grad_entropy is None or entropy is None else grad_entropy
        active = (labels != NO_LABEL) & ((g != 0) | (h != 0))
        share = 1.0 / (sumexp * self.temperature)
        scale, slope = -g * share, None
        if entropy is not None and grad_entropy is not None:
            scale = scale - h * share * (entropy - sumexp.log())
            slope = torch.where(active, -h * share * LN2, 0.0)
        target = torch.where(active, g / self.temperature, 0.0)
        return RowGradient(active, peak, torch.where(active, scale, 0.0), slope, target)

    def write_gradient(
        self, logits: Tensor, labels: Tensor, gradient: RowGradient, *, out: Tensor
    ) -> None:
        """Write d loss / d logits into `out`, [rows, width]; `out` may be `logits`.

        exp is computed anew: nothing but three numbers a row was kept of the first visit. Padded
        columns, and rows without a label or without incoming gradient, get exactly zero.
        """
        if kernels := device_kernels(logits, out):
            kernels.write_gradient(logits, labels, gradient, self.shard, c=self._c, out=out)
            return
        columns = self.shard.columns
        if columns < self.shard.width:
            out[:, columns:].zero_()
        if columns == 0:
            return
        index, owned = self.shard.columns_of(labels)
        target = torch.where(owned, gradient.target, 0.0)
        for rows in self._blocks(logits):
            self._block_gradient(
                logits[rows, :columns],
                index[rows, None],
                gradient.block(rows)._replace(target=target[rows, None]),
                out[rows, :columns],
            )
        if out.is_cpu:  # touch only those rows; on a device, finding them would mean waiting
            out.index_fill_(0, (~gradient.active).nonzero()[:, 0], 0.0)
        else:
            out.masked_fill_(~gradient.active[:, None], 0.0)

    def release(self) -> None:
        """Give the scratch back; the next visit takes new."""
        self._scratch.clear()

    def _block_statistics(self, logits: Tensor, index: Tensor, out: Tensor) -> None:
        """Statistics of one block of real columns into `out`, [4, rows]."""
        shifted = self._block("shifted", logits)
        values = logits if logits.dtype == shifted.dtype else shifted.copy_(logits)
        peak = torch.amax(values, -1, out=out[0]).mul_(self._c)
        peak.clamp_(min=torch.finfo(out.dtype).min, max=torch.finfo(out.dtype).max)
        self._shift(values, peak, out=shifted)
        out[3] = shifted.gather(1, index)[:, 0]
        if not self.with_entropy:
            torch.sum(shifted.exp2_(), -1, out=out[1])
            return
        shifted.clamp_(min=FLOOR)
        exp = torch.exp2(shifted, out=self._block("exp", logits))
        torch.sum(exp, -1, out=out[1])
        torch.sum(shifted.mul_(exp), -1, out=out[2])

    def _block_gradient(
        self, logits: Tensor, index: Tensor, gradient: RowGradient, out: Tensor
    ) -> None:
        result = out if out.dtype == compute_dtype(out.dtype) else self._block("exp", out)
        values = logits if logits.dtype == result.dtype else result.copy_(logits)
        if gradient.slope is None:
            self._shift(values, gradient.peak, out=result)
            result.exp2_().mul_(gradient.scale[:, None])
        else:
            shifted = self._shift(values, gradient.peak, out=self._block("shifted", out))
            torch.exp2(shifted.clamp_(min=FLOOR), out=result)
            result.mul_(shifted.mul_(gradient.slope[:, None]).add_(gradient.scale[:, None]))
        result.scatter_add_(1, index, gradient.target)
        if result is not out:
            out.copy_(result)

    def _shift(self, values: Tensor, peak: Tensor, *, out: Tensor) -> Tensor:
        """d into `out`, which may be `values`. In rows with a wild peak, what is no further from
        it than its own rounding is taken for the peak: there the largest d would not be near 0."""
        torch.add(-peak[:, None], values, alpha=self._c, out=out)
        wild = peak.abs() >= WILD
        if not wild.is_cpu or wild.any():
            rounding = torch.where(wild, peak.abs() * (torch.finfo(out.dtype).eps / 2), 0.0)
            out.masked_fill_(out.abs() <= rounding[:, None], 0.0)
        return out

    def _blocks(self, logits: Tensor) -> list[slice]:
        total = logits.shape[0]
        step = self._chunk_tokens or default_rows(logits)
        return [slice(start, min(start + step, total)) for start in range(0, total, step)]

    def _block(self, name: str, like: Tensor) -> Tensor:
        """fp32 scratch of the shape of `like`; blocks of one visit come largest first."""
        known = self._scratch.get(name)
        if known is None or known.shape[0] < like.shape[0] or known.device != like.device:
            known = like.new_empty(like.shape, dtype=compute_dtype(like.dtype))
            self._scratch[name] = known
        return known[: like.shape[0]]


def check_chunk_tokens(chunk_tokens: int | None) -> int | None:
    """`chunk_tokens`; raises ValueError unless it is None or at least 1."""
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: need at least 1, or None")
    return chunk_tokens


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or float64 for float64 logits (tests)."""
    return torch.promote_types(dtype, torch.float32)


def default_rows(logits: Tensor) -> int:
    """Rows of [rows, width] that fill a block of BLOCK_BYTES in fp32, at least 1."""
    size = BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES["cuda"])
    return max(1, size // (4 * logits.shape[1]))
