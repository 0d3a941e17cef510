"""Matrices in FP8 with one scale for each block, as FP8 engines hold them.

The layout is the one of published FP8 checkpoints (DeepSeek-V3, Qwen3-FP8): values in e4m3 under
the tensor's own name, and under the same name with `_scale_inv` what each 128 x 128 block has to
be multiplied by. The arithmetic is the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_dapo.resharding.block_grid import BLOCK, SCALE_SUFFIX, reached_by, scales_shape

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite value of e4m3."""
BAND_BLOCKS = 8
"""Rows of blocks that are worked on at a time: the fp32 scratch is as many rows."""


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values e4m3 [rows, cols] and scales fp32, one for each 128 x 128 block.

    The scale of a block is its largest absolute value / 448, so that this value is kept exactly
    up to the rounding of the division; 1 for a block of zeros. A value is its element / scale,
    rounded to nearest: off by at most 1/16 of itself, or by scale * 2**-10 where it is tiny.
    No gradient.

    Args:
        weight: [rows, cols], any floating dtype.

    Raises:
        ValueError: not a matrix.
        RuntimeError: it holds an infinity or NaN.
    """
    if weight.dim() != 2:
        raise ValueError(f"blocks of a tensor of shape {tuple(weight.shape)}: need a matrix")
    weight = weight.detach()
    peaks = torch.zeros(scales_shape(weight.shape), dtype=torch.float32, device=weight.device)
    raise_peaks(peaks, weight, row=0, col=0, dtype=weight.dtype)
    if not bool(torch.isfinite(peaks).all()):
        raise RuntimeError("a matrix to be sent in FP8 holds an infinity or NaN")
    scales = scales_of(peaks)
    values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    divide(weight, scales, out=values, row=0, col=0, dtype=weight.dtype)
    return values, scales


def raise_peaks(peaks: Tensor, part: Tensor, *, row: int, col: int, dtype: torch.dtype) -> None:
    """Raise the largest absolute value of each block to that of a part of the matrix.

    Args:
        peaks: fp32 [blocks down, blocks across], changed; a NaN in the part becomes its block's.
        part: [rows, cols] of the matrix from (row, col) on, in whatever place of a block.
        dtype: that the part is rounded to first.
    """
    rows, cols = part.shape
    for band, down in _bands(row, rows):
        across = reached_by(col, cols)
        values = part[band].to(dtype).float().abs()
        above, left = row + band.start - down.start * BLOCK, col - across.start * BLOCK
        below, right = down.stop * BLOCK - row - band.stop, across.stop * BLOCK - col - cols
        missing = (left, right, above, below)
        whole = torch.nn.functional.pad(values, missing) if any(missing) else values
        found = whole.view(len(down), BLOCK, len(across), BLOCK).amax(dim=(1, 3))
        place = peaks[down.start : down.stop, across.start : across.stop]
        place.copy_(torch.maximum(place, found))


def scales_of(peaks: Tensor) -> Tensor:
    """What each block has to be multiplied by: its largest absolute value / 448, 1 for zeros."""
    return torch.where(peaks == 0, 1.0, peaks / E4M3_MAX)


def divide(
    part: Tensor, scales: Tensor, *, out: Tensor, row: int, col: int, dtype: torch.dtype
) -> None:
    """Values of a part of a matrix.

    Args:
        part: [rows, cols] of the matrix from (row, col) on, in whatever place of a block.
        scales: fp32, of the whole matrix.
        out: e4m3 [rows, cols].
        dtype: that the part is rounded to first.
    """
    for band, _ in _bands(row, part.shape[0]):
        values = part[band].to(dtype).float()
        scaled = values / _spread(scales, row + band.start, values.shape[0], col, values.shape[1])
        out[band] = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def dequantize_blocks(values: Tensor, scales: Tensor) -> Tensor:
    """What the engine computes with: fp32 [rows, cols]."""
    return values.float() * _spread(scales, 0, values.shape[0], 0, values.shape[1])


def quantized(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each matrix as its values, followed by its scales.

    Raises:
        RuntimeError: a matrix holds an infinity or NaN; the message names it.
    """
    for name, tensor in tensors:
        try:
            values, scales = quantize_blocks(tensor)
        except RuntimeError as error:
            raise RuntimeError(f"{name!r}: {error}") from error
        yield name, values
        yield name + SCALE_SUFFIX, scales


def _bands(row: int, rows: int) -> Iterator[tuple[slice, range]]:
    """Of `rows` rows from `row` of a matrix on: runs of them, and the blocks that each reaches."""
    blocks = reached_by(row, rows)
    for first in range(blocks.start, blocks.stop, BAND_BLOCKS):
        down = range(first, min(first + BAND_BLOCKS, blocks.stop))
        start, stop = max(down.start * BLOCK, row), min(down.stop * BLOCK, row + rows)
        yield slice(start - row, stop - row), down


def _spread(scales: Tensor, row: int, rows: int, col: int, cols: int) -> Tensor:
    """Scale of each element of a box of the matrix."""
    down, across = reached_by(row, rows), reached_by(col, cols)
    part = scales[down.start : down.stop, across.start : across.stop]
    above, left = row - down.start * BLOCK, col - across.start * BLOCK
    tall = part.repeat_interleave(BLOCK, 0)[above : above + rows]
    return tall.repeat_interleave(BLOCK, 1)[:, left : left + cols]
