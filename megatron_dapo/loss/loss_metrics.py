"""What the policy loss reports: exact sums and counts, masked as the loss is masked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_dapo.loss.objectives import TokenInputs, TokenLosses
from megatron_dapo.observability.metrics import Kind, Metric, mean

LOSS_METRICS: Mapping[str, Kind] = {
    "actor/pg_loss": "mean",
    "actor/pg_clipfrac": "mean",
    "actor/pg_clipfrac/high": "mean",
    "actor/pg_clipfrac/low": "mean",
    "actor/pg_clipfrac/dual": "mean",
    "actor/ppo_kl": "mean",
    "actor/ratio_max": "max",
    "actor/ratio_min": "min",
    "actor/entropy": "mean",
    "actor/sampled_prob": "mean",
    "actor/kl_loss": "mean",
    "training/mismatch_mean": "mean",
    "training/mismatch_max": "max",
}
"""Every metric of the loss, by name.

pg_loss and kl_loss are divided as the loss is; the rest are means over counted tokens. Clip
fractions count where the clip removed the gradient (cispo: capped the weight); pg_clipfrac = high
+ low; dual without a dual_clip is the bound of e^20 that keeps the ratio finite. With ratio =
sequence they are shares of responses. ppo_kl is the mean of old - new, mismatch is
|old - rollout|, sampled_prob the mean probability of the sampled tokens.
"""


@torch.no_grad()
def loss_metrics(
    inputs: TokenInputs,
    losses: TokenLosses,
    *,
    weights: Tensor,
    denominator: Tensor,
    clip_weights: Tensor,
) -> dict[str, Metric]:
    """Metrics of one micro-batch, all of them sums over this rank's tokens.

    Args:
        weights: [tokens], of each token's loss.
        denominator: scalar, what weighted sums are divided by.
        clip_weights: [tokens] float64, what a token adds to a clip fraction: 1, or 1/|y| so that
            each response adds up to 1 wherever its tokens are. 0 where masked.
    """
    tokens = inputs.mask.sum()
    clipped, clip_count = losses.surrogate, clip_weights.sum()

    def token_mean(values: Tensor) -> Metric:
        return mean(torch.where(inputs.mask, values.double(), 0.0).sum(), tokens)

    def clip_share(where: Tensor) -> Metric:
        return mean((clip_weights * where).sum(), clip_count)

    metrics = {
        "actor/pg_loss": mean((losses.policy.double() * weights).sum(), denominator),
        "actor/pg_clipfrac": clip_share(clipped.high | clipped.low),
        "actor/pg_clipfrac/high": clip_share(clipped.high),
        "actor/pg_clipfrac/low": clip_share(clipped.low),
        "actor/pg_clipfrac/dual": clip_share(clipped.dual),
        "actor/ppo_kl": token_mean(-inputs.log_ratio),
        "actor/ratio_max": Metric("max", _largest(clipped.ratio, inputs.mask), tokens),
        "actor/ratio_min": Metric("min", -_largest(-clipped.ratio, inputs.mask), tokens),
        "actor/sampled_prob": token_mean(inputs.logprobs.exp()),
    }
    if inputs.entropy is not None:
        metrics["actor/entropy"] = token_mean(inputs.entropy)
    if losses.kl is not None:
        metrics["actor/kl_loss"] = mean((losses.kl.double() * weights).sum(), denominator)
    if inputs.log_weight is not None:
        gap = inputs.log_weight.abs()
        metrics["training/mismatch_mean"] = token_mean(gap)
        metrics["training/mismatch_max"] = Metric("max", _largest(gap, inputs.mask), tokens)
    return metrics


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """Largest counted value, scalar; -inf where nothing counts (also with no tokens at all)."""
    nothing = values.new_full((1,), -torch.inf)
    return torch.cat([nothing, torch.where(mask, values, -torch.inf)]).amax()
