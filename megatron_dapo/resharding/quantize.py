"""Matrices in FP8 with one scale for each block, as FP8 engines hold them.

The layout is the one of published FP8 checkpoints (DeepSeek-V3, Qwen3-FP8): values in e4m3 under
the tensor's own name, and under the same name with `_scale_inv` what each 128 x 128 block has to
be multiplied by. The arithmetic is the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

BLOCK = 128
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite value of e4m3."""
SCALE_SUFFIX = "_scale_inv"
BAND_BLOCKS = 8
"""Rows of blocks that are worked on at a time: the fp32 scratch is as many rows."""


def scales_shape(shape: tuple[int, ...], block: int = BLOCK) -> tuple[int, int]:
    """Number of blocks down and across a matrix; those at the edges may be cut short."""
    rows, cols = shape
    return -(-rows // block), -(-cols // block)


def quantize_blocks(weight: Tensor, *, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Values e4m3 [rows, cols] and scales fp32 [ceil(rows / block), ceil(cols / block)].

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
    values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    scales = torch.empty(
        scales_shape(tuple(weight.shape), block), dtype=torch.float32, device=weight.device
    )
    for first in range(0, scales.shape[0], BAND_BLOCKS):
        rows = slice(first * block, min((first + BAND_BLOCKS) * block, weight.shape[0]))
        band = weight[rows].float()
        scales[first : first + BAND_BLOCKS] = _band_scales(band, block)
        scaled = band / _spread(scales[first : first + BAND_BLOCKS], band, block)
        values[rows] = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    if not bool(torch.isfinite(scales).all()):
        raise RuntimeError("a matrix to be sent in FP8 holds an infinity or NaN")
    return values, scales


def dequantize_blocks(values: Tensor, scales: Tensor, *, block: int = BLOCK) -> Tensor:
    """What the engine computes with: fp32 [rows, cols]."""
    return values.float() * _spread(scales, values, block)


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


def _band_scales(band: Tensor, block: int) -> Tensor:
    """Scales of whole rows of blocks, from fp32 [rows, cols]."""
    down, across = scales_shape(tuple(band.shape), block)
    missing = (0, across * block - band.shape[1], 0, down * block - band.shape[0])
    whole = torch.nn.functional.pad(band, missing) if any(missing) else band
    peaks = whole.abs().view(down, block, across, block).amax(dim=(1, 3))
    return torch.where(peaks == 0, 1.0, peaks / E4M3_MAX)


def _spread(scales: Tensor, like: Tensor, block: int) -> Tensor:
    """Scale of each element of the rows and columns of `like`."""
    rows = scales.repeat_interleave(block, 0)[: like.shape[0]]
    return rows.repeat_interleave(block, 1)[:, : like.shape[1]]
