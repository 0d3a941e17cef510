"""Advantages: relative to the group (GRPO, DAPO, Dr.GRPO, GSPO) or to a critic (PPO)."""

from __future__ import annotations

import torch
from torch import Tensor

SPREAD_TOLERANCE = 1e-6
"""A group whose rewards span no more than this carries no signal; its advantages are exactly 0."""


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    valid: Tensor | None = None,
    normalize_std: bool = True,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of each response over its group, [responses] fp32 (DAPO Eq. 9).

    (reward - mean) / (std + eps), with statistics in float64: in fp32 sixteen equal rewards of
    -1.4 have a standard deviation of 1e-7 and so advantages of -0.1. A group without spread, a
    group of one and an invalid member get exactly 0. Nothing here carries gradient.

    Args:
        rewards: [responses] float, shaped rewards. Entries of invalid members may be NaN.
        group_ids: [responses] int, any ids; equal ids are one group, in any order.
        valid: [responses] bool, False: neither counted nor given an advantage. Default: all True.
        normalize_std: divide by the standard deviation; False is Dr.GRPO.
        unbiased: n - 1 in that deviation; False: population.
        eps: added to the deviation.

    Raises:
        ValueError: shapes differ, or the reward of a valid member is not finite.
    """
    rewards = rewards.detach()
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    if not rewards.shape == group_ids.shape == valid.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, group_ids {tuple(group_ids.shape)} and valid "
            f"{tuple(valid.shape)} must all be [responses]"
        )
    bad = valid & ~rewards.isfinite()
    if bad.any():
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"rewards[{first}] is {rewards[first].item()}: rewards must be finite; mark a response "
            "that could not be graded as not valid"
        )
    if rewards.numel() == 0:
        return rewards.to(torch.float32)
    ids, index = torch.unique(group_ids, return_inverse=True)
    values = torch.where(valid, rewards.to(torch.float64), 0.0)
    counts = values.new_zeros(ids.numel()).index_add_(0, index, valid.double())
    sums = torch.zeros_like(counts).index_add_(0, index, values)
    centred = torch.where(valid, values - (sums / counts.clamp(min=1))[index], 0.0)
    advantages = centred
    if normalize_std:
        squares = torch.zeros_like(counts).index_add_(0, index, centred.square())
        variance = squares / (counts - int(unbiased)).clamp(min=1)
        advantages = centred / (variance.sqrt() + eps)[index]
    highest = _reduce(values.masked_fill(~valid, -torch.inf), index, ids.numel(), "amax")
    lowest = _reduce(values.masked_fill(~valid, torch.inf), index, ids.numel(), "amin")
    constant = highest - lowest <= SPREAD_TOLERANCE
    return torch.where(valid & ~constant[index], advantages, 0.0).to(torch.float32)


def _reduce(values: Tensor, index: Tensor, groups: int, how: str) -> Tensor:
    empty = values.new_zeros(groups)
    return empty.scatter_reduce(0, index, values, how, include_self=False)


def generalized_advantages(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of generalised advantage estimation, both [batch, seq] fp32 (PPO).

    delta_t = r_t + gamma * V_next - V_t;  A_t = delta_t + gamma * lam * A_next;  return = A + V.
    "Next" is the next *counted* token: masked tokens (prompt, tool output, padding) hand the
    later advantage and value through unchanged and get 0 themselves. Rewards and values at
    masked tokens are never read, NaN included. Computed in float64; no gradient.

    Args:
        rewards: [batch, seq] float, reward of each token (usually only the last one's is not 0).
        values: [batch, seq] float, critic's value before the token.
        loss_mask: [batch, seq] bool, True on counted tokens.
        gamma: discount, 1 for one-shot answers.
        lam: lambda of the estimator.
    """
    if not rewards.shape == values.shape == loss_mask.shape or rewards.dim() != 2:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and loss_mask "
            f"{tuple(loss_mask.shape)} must all be [batch, seq]"
        )
    mask = loss_mask.bool()
    reward = torch.where(mask, rewards.detach().double(), 0.0)
    value = torch.where(mask, values.detach().double(), 0.0)
    advantages = torch.zeros_like(value)
    later_advantage = value.new_zeros(value.shape[0])
    later_value = value.new_zeros(value.shape[0])
    for t in reversed(range(value.shape[1])):
        counted = mask[:, t]
        delta = reward[:, t] + gamma * later_value - value[:, t]
        later_advantage = torch.where(
            counted, delta + gamma * lam * later_advantage, later_advantage
        )
        later_value = torch.where(counted, value[:, t], later_value)
        advantages[:, t] = torch.where(counted, later_advantage, 0.0)
    returns = torch.where(mask, advantages + value, 0.0)
    return advantages.to(torch.float32), returns.to(torch.float32)
