"""The formulas of one token: clipped surrogate, KL estimators, mismatch weights.

All are elementwise on [tokens]: nothing here sums or averages. The sequence-level forms see the
response's value at each of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dapo.config.schema import LossConfig

LOG_RATIO_LIMIT = 20.0
"""Bound of log-ratios, so that exp stays finite. A ratio beyond it has no gradient: above, with a
negative advantage, it caps the loss as dual_clip does and counts as dual; below, the gradient that
is lost is 2e-9 of an advantage."""
SEQUENCE_MISMATCHES = ("tis_sequence", "sequence_mask", "geometric")
"""Corrections that weigh a response as a whole."""


@dataclass(frozen=True)
class TokenInputs:
    """What the loss reads, [tokens] each; 0 where `mask` is False, so NaN there is harmless."""

    mask: Tensor  # bool
    logprobs: Tensor  # carries gradient
    old_logprobs: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None  # carries gradient

    @classmethod
    def masked(cls, mask: Tensor, **tensors: Tensor | None) -> TokenInputs:
        """Fields by name, with 0 (and no gradient) wherever `mask` is False."""
        zeroed = {k: None if t is None else torch.where(mask, t, 0.0) for k, t in tensors.items()}
        return cls(mask=mask, **zeroed)  # type: ignore[arg-type]

    def block(self, rows: slice, logprobs: Tensor, entropy: Tensor) -> TokenInputs:
        """These rows, with their log-probs and entropy taken from the arguments, masked."""
        mask = self.mask[rows]
        optional = {
            name: None if tensor is None else tensor[rows]
            for name, tensor in (
                ("rollout_logprobs", self.rollout_logprobs),
                ("reference_logprobs", self.reference_logprobs),
            )
        }
        return TokenInputs(
            mask=mask,
            logprobs=torch.where(mask, logprobs, 0.0),
            old_logprobs=self.old_logprobs[rows],
            advantages=self.advantages[rows],
            entropy=torch.where(mask, entropy, 0.0),
            **optional,
        )

    @property
    def log_ratio(self) -> Tensor:
        """log(pi / pi_old) of each token, carries gradient."""
        return self.logprobs - self.old_logprobs

    @property
    def log_weight(self) -> Tensor | None:
        """log(pi_old / mu) of each token, mu the rollout engine's policy."""
        if self.rollout_logprobs is None:
            return None
        return self.old_logprobs - self.rollout_logprobs


class Surrogate(NamedTuple):
    """Loss of each token and where the clip bit, all [tokens]."""

    loss: Tensor  # carries gradient
    ratio: Tensor
    high: Tensor  # bool, upper clip: the gradient is gone (ppo) or capped (cispo)
    low: Tensor  # bool, lower clip
    dual: Tensor  # bool, dual clip, or without one the bound of exp


def surrogate(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig
) -> Surrogate:
    """Clipped policy loss of each token, to be minimised, [tokens] (DAPO Eq. 8 and 10).

    ppo:   max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), for A < 0 at most -dual_clip A.
    cispo: -detach(clip(r, 1 - clip_low, 1 + clip_high)) A logprob; dual_clip has no part in it.

    Args:
        log_ratio: [tokens], carries gradient; of the token, or of its response (GSPO).
        logprobs: [tokens], carries gradient; read by cispo.
        advantages: [tokens].
    """
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    above, below = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.objective == "cispo":
        loss = -clipped.detach() * advantages * logprobs
        return Surrogate(loss, ratio.detach(), above, below, torch.zeros_like(above))
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    dual = (advantages < 0) & (log_ratio > LOG_RATIO_LIMIT)
    if config.dual_clip is not None:
        dual = (advantages < 0) & (ratio > config.dual_clip)
        loss = torch.where(dual, -config.dual_clip * advantages, loss)
    return Surrogate(loss, ratio.detach(), above & (advantages > 0), below & (advantages < 0), dual)


class TokenLosses(NamedTuple):
    """Losses of each token before weights and sums, [tokens]."""

    total: Tensor  # policy + kl_coef * kl - entropy_coef * entropy; carries gradient
    policy: Tensor  # the surrogate's loss times the mismatch weight
    kl: Tensor | None
    surrogate: Surrogate


def token_losses(
    inputs: TokenInputs, log_ratio: Tensor, log_weight: Tensor | None, config: LossConfig
) -> TokenLosses:
    """The loss of each token, [tokens].

    Args:
        inputs: masked inputs.
        log_ratio: [tokens], carries gradient; `inputs.log_ratio` or its mean over the response.
        log_weight: [tokens]; `inputs.log_weight`, or its sum or mean over the response.

    Raises:
        ValueError: an input that the config needs is missing.
    """
    clipped = surrogate(log_ratio, inputs.logprobs, inputs.advantages, config)
    policy = clipped.loss
    if config.mismatch != "none":
        weight = mismatch_weight(_given(log_weight, "rollout_logprobs", "mismatch", config), config)
        policy = policy * weight
    total, kl = policy, None
    if config.kl_coef > 0 or inputs.reference_logprobs is not None:
        reference = _given(inputs.reference_logprobs, "reference_logprobs", "kl_coef", config)
        kl = kl_penalty(inputs.logprobs, reference, config)
        if config.kl_coef > 0:  # else it is a metric alone: 0 * inf would be NaN
            total = total + config.kl_coef * kl
    if config.entropy_coef > 0:
        total = total - config.entropy_coef * _given(
            inputs.entropy, "entropy", "entropy_coef", config
        )
    return TokenLosses(total, policy, kl, clipped)


def _given(tensor: Tensor | None, name: str, key: str, config: LossConfig) -> Tensor:
    if tensor is None:
        raise ValueError(
            f"{name} is None but loss.{key}={config.model_dump()[key]} needs it, [tokens] fp32"
        )
    return tensor


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, config: LossConfig) -> Tensor:
    """Estimate of KL(policy || reference) at each token, [tokens], with gradient to `logprobs`.

    k1 = log(pi / ref), k2 = k1^2 / 2, k3 = ref / pi - 1 + k1 (GRPO). Values of k1 and k3 are
    unbiased; as a differentiated loss only k2 has the gradient of that KL. k3 is bounded, and has
    no gradient, where ref / pi passes e^20.
    """
    k1 = logprobs - reference_logprobs
    if config.kl_estimator == "k1":
        return k1
    if config.kl_estimator == "k2":
        return 0.5 * k1.square()
    k1 = k1.clamp(min=-LOG_RATIO_LIMIT)
    return torch.expm1(-k1) + k1


def mismatch_weight(log_weight: Tensor, config: LossConfig) -> Tensor:
    """Factor on each token's surrogate that corrects trainer against engine, [tokens].

    Args:
        log_weight: [tokens], without gradient; log(old / rollout) of the token (tis_token,
            icepop), its sum over the response (tis_sequence, sequence_mask) or its mean
            (geometric).

    tis_*: the weight cut off at mismatch_high. icepop, sequence_mask, geometric: the weight where
    it lies in [mismatch_low, mismatch_high], else 0. Rejected tokens stay in the denominator.
    """
    weight = log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if config.mismatch in ("tis_token", "tis_sequence"):
        return weight.clamp(max=config.mismatch_high)
    inside = (weight >= config.mismatch_low) & (weight <= config.mismatch_high)
    return torch.where(inside, weight, 0.0)


def uses_whole_sequences(config: LossConfig) -> bool:
    """A token's loss needs its whole response's log-probs first (GSPO, sequence corrections)."""
    return config.ratio == "sequence" or config.mismatch in SEQUENCE_MISMATCHES
