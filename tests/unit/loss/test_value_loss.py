"""The value loss against its formula in float64, and what must not reach it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_dapo.loss.policy_loss import LossTerms
from megatron_dapo.loss.value_loss import VALUE_METRICS, value_loss
from megatron_dapo.observability.metrics import MetricBag

WIDTH = 0.5


def run(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor | None = None) -> LossTerms:
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    return value_loss(
        values,
        old,
        returns,
        mask,
        clip_width=WIDTH,
        token_weights=mask.to(values.dtype),
        denominator=mask.sum(),
    )


def reference(value: float, old: float, target: float) -> tuple[float, float]:
    """Loss of a token and its gradient."""
    bounded = min(max(value, old - WIDTH), old + WIDTH)
    if (bounded - target) ** 2 > (value - target) ** 2:
        return 0.5 * (bounded - target) ** 2, 0.0
    return 0.5 * (value - target) ** 2, value - target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_are_ppo_s(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(400, generator=g, dtype=dtype) for _ in range(3))
    mask = torch.rand(400, generator=g) < 0.7
    values.requires_grad_()
    terms = run(values, old, returns, mask)
    (gradient,) = torch.autograd.grad(terms.loss_sum, values)
    rows = zip(*(x.tolist() for x in (values, old, returns, mask)), strict=True)
    expected = [reference(v, o, r) if keep else (0.0, 0.0) for v, o, r, keep in rows]
    losses, slopes = torch.tensor(expected, dtype=torch.float64).unbind(1)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    assert terms.loss_sum.item() == pytest.approx(losses.sum().item(), rel=tolerance)
    torch.testing.assert_close(gradient.double(), slopes, atol=tolerance, rtol=tolerance)
    assert terms.denominator.item() == int(mask.sum())


def test_metrics_are_means_over_counted_tokens() -> None:
    values = torch.tensor([1.0, 2.0, 0.0, 9.0])
    old, returns = torch.tensor([1.0, 1.0, 1.0, 9.0]), torch.tensor([0.0, 2.0, 2.0, 9.0])
    terms = run(values, old, returns, torch.tensor([True, True, True, False]))
    assert terms.metrics.keys() == VALUE_METRICS.keys()
    assert {name: metric.kind for name, metric in terms.metrics.items()} == VALUE_METRICS
    # token 2 moved towards its return beyond the width: clipped; token 3 away from it: not
    assert MetricBag(terms.metrics).values() == {
        "critic/vf_loss": pytest.approx((0.5 + 0.125 + 2.0) / 3),
        "critic/vf_clipfrac": pytest.approx(1 / 3),
        "critic/values/mean": pytest.approx(1.0),
        "critic/returns/mean": pytest.approx(4 / 3),
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_masked_may_be_anything(bad: float) -> None:
    mask = torch.tensor([True, False])
    values = torch.tensor([0.3, bad], requires_grad=True)
    poisoned = torch.tensor([1.0, bad])
    terms = run(values, poisoned, poisoned, mask)
    (gradient,) = torch.autograd.grad(terms.loss_sum, values)
    clean = run(values.detach()[:1], poisoned[:1], poisoned[:1])
    assert terms.loss_sum.item() == clean.loss_sum.item()
    assert gradient.isfinite().all() and gradient[1] == 0
    assert MetricBag(terms.metrics).values() == MetricBag(clean.metrics).values()


@pytest.mark.parametrize(
    ("value", "old", "target"),
    [
        (0.0, 0.0, 1.0),  # not moved yet: the first update of a rollout
        (0.5, 0.0, 1.0),  # exactly at the bound
        (0.75, 0.0, 0.625),  # beyond it, as far from the return as the bound is
    ],
)
def test_equal_branches_keep_the_whole_gradient(value: float, old: float, target: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    terms = run(values, torch.tensor([old]), torch.tensor([target]))
    (gradient,) = torch.autograd.grad(terms.loss_sum, values)
    assert gradient.item() == value - target
    assert MetricBag(terms.metrics).values()["critic/vf_clipfrac"] == 0


def test_nothing_counted_is_zero_and_still_has_a_gradient() -> None:
    values = torch.tensor([0.3, 0.4], requires_grad=True)
    terms = run(values, torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(terms.loss_sum, values)
    assert terms.loss_sum.item() == 0 and terms.denominator.item() == 0
    assert gradient.tolist() == [0, 0]
    assert MetricBag(terms.metrics).values() == {}


def test_values_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"values \(2, 1\)"):
        run(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.bool))
