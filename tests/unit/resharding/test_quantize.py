"""FP8 blocks: scales, layout, error bounds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dapo.resharding.quantize import (
    BLOCK,
    E4M3,
    E4M3_MAX,
    dequantize_blocks,
    divide,
    quantize_blocks,
    quantized,
    raise_peaks,
    scales_of,
    scales_shape,
)
from tests.unit.handed import handed_cases

Case = dict[str, Any]


@pytest.mark.parametrize("case", handed_cases("g", "fp8_scale"))
def test_scale_of_handed_cases(case: Case) -> None:
    values, scales = quantize_blocks(torch.tensor(case["input"]["block"]))
    assert bool(torch.isfinite(scales).all())
    assert torch.equal(values.float(), torch.tensor(case["expect"]["stored"]))
    if "scale" in case["expect"]:
        assert scales.tolist() == [[case["expect"]["scale"]]]


def reference(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales block by block, scaled values, and how far each is from the nearest e4m3 number."""
    grid = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    grid = grid[torch.isfinite(grid)].unique()
    down, across = scales_shape(tuple(weight.shape))
    scales, scaled = torch.empty(down, across), torch.empty(weight.shape, dtype=torch.float64)
    for i in range(down):
        for j in range(across):
            at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            part = weight[at].float()
            peak = part.abs().max()
            scales[i, j] = 1.0 if peak == 0 else peak / E4M3_MAX
            scaled[at] = (part / scales[i, j]).double()
    place = torch.searchsorted(grid, scaled).clamp(1, len(grid) - 1)
    nearest = torch.minimum((scaled - grid[place - 1]).abs(), (grid[place] - scaled).abs())
    return scales, scaled, nearest


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 1), (1300, 130), (64, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_scaled_each_by_its_own_peak(shape: tuple[int, int], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=g) * torch.rand(shape, generator=g).pow(8)
    weight = weight.to(dtype)
    values, scales = quantize_blocks(weight)
    expected, scaled, nearest = reference(weight)
    assert values.dtype == E4M3 and scales.dtype == torch.float32
    assert torch.equal(scales, expected)
    assert torch.equal((values.double() - scaled).abs(), nearest)


@pytest.mark.parametrize("outlier", [1.0, 1e4])
def test_the_error_is_the_rounding_of_e4m3_alone(outlier: float) -> None:
    weight = torch.randn(384, 256, generator=torch.Generator().manual_seed(5))
    weight[3, 7] *= outlier
    values, scales = quantize_blocks(weight)
    error = (dequantize_blocks(values, scales) - weight).abs()
    each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert bool((error <= torch.maximum(weight.abs() / 16, each * 2**-10) * 1.0001).all())
    untouched = error[:, BLOCK:] / weight[:, BLOCK:].abs().mean()
    assert untouched.mean() < 0.03, "an outlier costs its own block alone"


@pytest.mark.parametrize("cuts", [(0, 300), (0, 64, 100, 300), (0, 128, 256, 300), (0, 1, 2, 300)])
def test_parts_cut_anywhere_give_the_same_bytes_as_the_whole(cuts: tuple[int, ...]) -> None:
    weight = torch.randn(300, 300, generator=torch.Generator().manual_seed(9))
    weight = weight * torch.logspace(-3, 3, 300)
    exact, wanted = quantize_blocks(weight.bfloat16())
    boxes = [
        (slice(top, bottom), slice(left, right))
        for top, bottom in pairwise(cuts)
        for left, right in pairwise(cuts)
    ]
    peaks = torch.zeros(wanted.shape)
    for rows, cols in boxes:  # each rank of its own, then the maximum over the ranks
        mine = torch.zeros(wanted.shape)
        place = {"row": rows.start, "col": cols.start, "dtype": torch.bfloat16}
        raise_peaks(mine, weight[rows, cols], **place)
        peaks = torch.maximum(peaks, mine)
    scales = scales_of(peaks)
    values = torch.zeros(weight.shape).to(E4M3)
    for rows, cols in boxes:
        place = {"row": rows.start, "col": cols.start, "dtype": torch.bfloat16}
        divide(weight[rows, cols], scales, out=values[rows, cols], **place)
    assert torch.equal(scales, wanted)
    assert torch.equal(values.view(torch.uint8), exact.view(torch.uint8))


def test_a_peak_survives_and_zeros_stay_zeros() -> None:
    weight = torch.zeros(256, 256)
    weight[0, 0], weight[0, 1] = -3.7, 1e-9
    values, scales = quantize_blocks(weight)
    assert values[0, 0].float() == -E4M3_MAX
    assert torch.allclose(dequantize_blocks(values, scales)[0, 0], torch.tensor(-3.7))
    assert scales[1].tolist() == [1.0, 1.0] and not values[BLOCK:].float().any()


def test_scales_follow_their_weights() -> None:
    weight = torch.randn(130, 70)
    before = weight.clone()
    (name, values), (scale_name, scales) = quantized([("a.weight", weight)])
    assert torch.equal(weight, before), "the policy's own weights were changed"
    assert (name, scale_name) == ("a.weight", "a.weight_scale_inv")
    assert values.shape == weight.shape and tuple(scales.shape) == (2, 1)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_matrix_that_is_not_finite_is_named(bad: float) -> None:
    weight = torch.ones(200, 200)
    weight[150, 150] = bad
    with pytest.raises(RuntimeError, match=r"'b\.weight'.*infinity or NaN"):
        list(quantized([("a.weight", torch.ones(4, 4)), ("b.weight", weight)]))


def test_only_matrices_have_blocks() -> None:
    with pytest.raises(ValueError, match="need a matrix"):
        quantize_blocks(torch.ones(3))
