"""The two visits of `loss.shards` as Triton kernels: one read, and one read with one write.

A GPU is bound by bytes: statistics read a row once, the gradient reads it and writes, all else
stays in registers (6 bytes a bf16 logit, 12 an fp32 logit). Arithmetic is fp32, in the same powers
of two and with the same fused multiply-add as on CPU. Nothing is summed atomically: two runs agree
bit by bit.

Imported only where it will run (`loss.device_kernels`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_dapo.loss.shards import FLOOR, WILD

if TYPE_CHECKING:
    from megatron_dapo.loss.shards import RowGradient, VocabShard

STEPS, LANES, STATISTICS_WARPS = 8, 1024, 4
"""A row is read in tiles of STEPS x LANES; a thread owns 8 lanes, so that it merges its own
columns without waiting for another, and one rescaling serves STEPS columns."""
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 4
"""Columns of one program of the gradient."""

_FLOOR = tl.constexpr(FLOOR)
_WILD = tl.constexpr(WILD)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_ROUNDING = tl.constexpr(torch.finfo(torch.float32).eps / 2)


def row_statistics(
    logits: Tensor,
    labels: Tensor,
    shard: VocabShard,
    *,
    c: float,
    with_entropy: bool,
    out: Tensor,
) -> None:
    """This rank's (peak, sumexp, weighted, target) of each row into `out`; one read of the logits.

    Args:
        logits: [rows, width] fp32, bf16 or fp16, columns side by side.
        labels: [rows] int64 token ids or NO_LABEL.
        c: log2(e) / temperature.
        out: [4, rows] fp32, rows side by side; `weighted` is left alone without `with_entropy`.
    """
    rows, width = logits.shape
    if rows == 0:
        return
    with torch.cuda.device_of(logits):
        _statistics_kernel[(rows,)](
            logits,
            labels.contiguous(),
            out,
            logits.stride(0),
            out.stride(0),
            width,
            shard.columns,
            shard.first,
            c,
            WITH_ENTROPY=with_entropy,
            STEPS=STEPS,
            LANES=LANES,
            num_warps=STATISTICS_WARPS,
        )


def write_gradient(
    logits: Tensor,
    labels: Tensor,
    gradient: RowGradient,
    shard: VocabShard,
    *,
    c: float,
    out: Tensor,
) -> None:
    """Write d loss / d logits into `out`; one read of the logits, one write.

    Padded columns, and rows that are not active, get exactly zero, whatever they hold.

    Args:
        logits: [rows, width] fp32, bf16 or fp16, columns side by side.
        labels: [rows] int64 token ids or NO_LABEL.
        gradient: coefficients, each [rows].
        c: log2(e) / temperature.
        out: [rows, width] fp32, bf16 or fp16, columns side by side; may be `logits`.
    """
    rows, width = logits.shape
    if rows == 0:
        return
    blocks = triton.cdiv(width, GRADIENT_BLOCK)
    slope = gradient.scale if gradient.slope is None else gradient.slope
    with torch.cuda.device_of(logits):
        _gradient_kernel[(rows * blocks,)](
            logits,
            labels.contiguous(),
            gradient.active.contiguous(),
            gradient.peak.contiguous(),
            gradient.scale.contiguous(),
            slope.contiguous(),
            gradient.target.contiguous(),
            out,
            logits.stride(0),
            out.stride(0),
            blocks,
            width,
            shard.columns,
            shard.first,
            c,
            WITH_SLOPE=gradient.slope is not None,
            BLOCK=GRADIENT_BLOCK,
            num_warps=GRADIENT_WARPS,
        )


@triton.jit
def _label_column(labels, row, first, columns):
    """Column of a row's label among this rank's real columns; -1: another rank's, or no label."""
    column = tl.load(labels + row) - first
    return tl.where((column >= 0) & (column < columns), column, -1).to(tl.int32)


@triton.jit
def _shift(z, c, peak):
    """d of fp32 logits z of a row, as `RowVisitor._shift` has it."""
    shifted = tl.fma(z, c, -peak)
    rounding = tl.where(tl.abs(peak) >= _WILD, tl.abs(peak) * _ROUNDING, -1.0)
    return tl.where(tl.abs(shifted) <= rounding, 0.0, shifted)


@triton.jit
def _fold(z, c, peak, sumexp, weighted, WITH_ENTROPY: tl.constexpr):
    """Statistics of each lane after one more tile z, [STEPS, LANES] fp32.

    A maximum drops NaN, but then 2^d is NaN and with it sumexp and weighted.
    """
    new = tl.minimum(tl.maximum(peak, c * tl.max(z, axis=0)), _LARGEST)
    drop = tl.maximum(peak - new, _FLOOR)
    factor = tl.exp2(drop)
    shifted = tl.fma(z, c, -new[None, :])
    exp = tl.exp2(shifted)
    if WITH_ENTROPY:
        terms = tl.maximum(shifted, _FLOOR) * exp
        weighted = factor * (weighted + drop * sumexp) + tl.sum(terms, axis=0)
    sumexp = factor * sumexp + tl.sum(exp, axis=0)
    return new, sumexp, weighted


@triton.jit
def _statistics_kernel(
    logits,
    labels,
    out,
    row_stride,
    out_stride,
    width,
    columns,
    first,
    c,
    WITH_ENTROPY: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * row_stride
    places = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    peak = tl.full((LANES,), -_LARGEST, tl.float32)
    sumexp = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    whole = columns // (STEPS * LANES) * (STEPS * LANES)
    for start in range(0, whole, STEPS * LANES):
        z = tl.load(here + start + places).to(tl.float32)
        peak, sumexp, weighted = _fold(z, c, peak, sumexp, weighted, WITH_ENTROPY)
    last = whole + places
    z = tl.load(here + last, mask=last < columns, other=-float("inf")).to(tl.float32)
    peak, sumexp, weighted = _fold(z, c, peak, sumexp, weighted, WITH_ENTROPY)

    top = tl.max(peak, axis=0)
    drop = tl.maximum(peak - top, _FLOOR)
    factor = tl.exp2(drop)
    weighted = factor * (weighted + drop * sumexp)
    sumexp = factor * sumexp
    column = _label_column(labels, row, first, columns)
    target = tl.load(here + column, mask=column >= 0, other=0.0).to(tl.float32)
    target = _shift(target, c, top)
    if tl.abs(top) >= _WILD:  # no peak but this one would do: the row once more
        sumexp = tl.zeros((LANES,), tl.float32)
        weighted = tl.zeros((LANES,), tl.float32)
        for start in range(0, columns, STEPS * LANES):
            at = start + places
            z = tl.load(here + at, mask=at < columns, other=-float("inf")).to(tl.float32)
            shifted = _shift(z, c, top)
            exp = tl.exp2(shifted)
            sumexp += tl.sum(exp, axis=0)
            weighted += tl.sum(tl.maximum(shifted, _FLOOR) * exp, axis=0)
    tl.store(out + row, top)
    tl.store(out + out_stride + row, tl.sum(sumexp, axis=0))
    if WITH_ENTROPY:
        tl.store(out + 2 * out_stride + row, tl.sum(weighted, axis=0))
    tl.store(out + 3 * out_stride + row, tl.where(column >= 0, target, 0.0))


@triton.jit
def _gradient_kernel(
    logits,
    labels,
    active,
    peak,
    scale,
    slope,
    target,
    out,
    row_stride,
    out_stride,
    blocks,
    width,
    columns,
    first,
    c,
    WITH_SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK columns of a row."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    places = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    trains = tl.load(active + row) != 0
    # loads end with the row's memory and not with its last real column, which may cut a wide load
    stop = tl.where(trains, width, 0)
    z = tl.load(logits + row * row_stride + places, mask=places < stop, other=0.0)
    shifted = _shift(z.to(tl.float32), c, tl.load(peak + row))
    result = tl.load(scale + row)
    if WITH_SLOPE:
        shifted = tl.maximum(shifted, _FLOOR, propagate_nan=tl.PropagateNan.ALL)
        result = tl.fma(shifted, tl.load(slope + row), result)
    result = tl.exp2(shifted) * result
    column = _label_column(labels, row, first, columns)
    result = tl.where(places == column, result + tl.load(target + row), result)
    result = tl.where(places < tl.where(trains, columns, 0), result, 0.0)
    tl.store(out + row * out_stride + places, result.to(out.dtype.element_ty), mask=places < width)
