"""Clipped value loss of a critic (PPO), one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_dapo.loss.policy_loss import LossTerms, check_shapes
from megatron_dapo.observability.metrics import Kind, Metric, mean

VALUE_METRICS: Mapping[str, Kind] = {
    "critic/vf_loss": "mean",
    "critic/vf_clipfrac": "mean",
    "critic/values/mean": "mean",
    "critic/returns/mean": "mean",
}
"""Means over counted tokens. values are those at the rollout; clipfrac is the share of tokens
whose clipped loss is the larger, so that they have no gradient."""


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    clip_width: float,
    token_weights: Tensor,
    denominator: Tensor,
) -> LossTerms:
    """Sum of 0.5 * max((V - R)^2, (clip(V, V_old - w, V_old + w) - R)^2) over counted tokens.

    (PPO; the clipped form of OpenAI's baselines and of verl.) Where both are equal the first
    counts, so the gradient is never halved. Local: who divides is in `loss.denominators`.

    Args:
        values: [tokens] fp32, of the critic that trains. Carries gradient.
        old_values: [tokens] fp32, of the critic before this rollout's first update.
        returns: [tokens] fp32.
        loss_mask: [tokens] bool, True on tokens that train; elsewhere the floats may be NaN.
        clip_width: w, in units of reward.
        token_weights: [tokens] float64, `Ledger.token_weights` of this micro-batch.
        denominator: int64 scalar, `Ledger.denominator` of this micro-batch.

    Raises:
        ValueError: shapes differ.
    """
    check_shapes(
        loss_mask,
        values=values,
        old_values=old_values,
        returns=returns,
        token_weights=token_weights,
    )
    new, old, target = (torch.where(loss_mask, x, 0.0) for x in (values, old_values, returns))
    free = 0.5 * (new - target).square()
    bounded = 0.5 * (new.clamp(old - clip_width, old + clip_width) - target).square()
    clipped = bounded > free
    losses = torch.where(clipped, bounded, free) * torch.where(loss_mask, token_weights, 0.0)
    tokens = loss_mask.sum()

    def token_mean(amounts: Tensor) -> Metric:
        return mean(amounts.detach().double().sum(), tokens)

    metrics = {
        "critic/vf_loss": mean(losses.detach().double().sum(), denominator),
        "critic/vf_clipfrac": token_mean(clipped),
        "critic/values/mean": token_mean(old),
        "critic/returns/mean": token_mean(target),
    }
    return LossTerms(losses.sum().to(values.dtype), denominator, metrics)
