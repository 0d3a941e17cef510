"""Advantages and returns of packed responses from a critic's values (PPO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo import device
from megatron_dapo.batch.advantages import generalized_advantages
from megatron_dapo.types import MicroBatch

WHITENING_EPS = 1e-8
"""Added to the variance (verl), so that equal advantages become 0 and not NaN."""


def critic_advantages(
    updates: Sequence[Sequence[MicroBatch]],
    *,
    gamma: float,
    lam: float,
    dp_group: dist.ProcessGroup | None = None,
) -> list[list[MicroBatch]]:
    """The micro-batches of a rollout step with `advantages` and `returns` of each counted token.

    The shaped reward of a response comes with its last counted token. Advantages are whitened
    over all counted tokens of the step (mean 0, unbiased standard deviation 1); returns are
    those of the advantages before that. Both are 0 at tokens that do not count.

    Every rank of `dp_group` calls it with its whole packs (before any context cut), values set.
    Communicates: one sum of 3 float64 numbers.

    Args:
        updates: micro-batches by update; each response of the step is in exactly one of them.
        gamma: discount a token.
        lam: lambda of generalised advantage estimation.
    """
    packs = [pack for update in updates for pack in update]
    mask = torch.cat([pack.loss_mask for pack in packs])
    advantages, returns = _estimate(packs, gamma, lam)
    whitened = _whiten(advantages[mask], dp_group)
    advantages = torch.zeros_like(advantages).masked_scatter_(mask, whitened)
    sizes = [pack.num_tokens for pack in packs]
    parts = zip(packs, advantages.split(sizes), returns.split(sizes), strict=True)
    filled = (pack.replace(advantages=own, returns=targets) for pack, own, targets in parts)
    return [[next(filled) for _ in update] for update in updates]


class _Places(NamedTuple):
    """Where the counted tokens of all packs lie in a matrix of one response a row."""

    rows: Tensor  # [counted] int64
    columns: Tensor  # [counted] int64

    @classmethod
    def of(cls, packs: Sequence[MicroBatch]) -> _Places:
        first, rows, columns = 0, [], []
        for pack in packs:
            rows.append(first + pack.sequence_index[pack.loss_mask])
            columns.append(pack.position_ids[pack.loss_mask])
            first += pack.num_sequences
        return cls(torch.cat(rows), torch.cat(columns))


def _estimate(packs: Sequence[MicroBatch], gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the concatenated packs, [tokens of all packs] fp32."""
    mask = torch.cat([pack.loss_mask for pack in packs])
    flat_values = torch.cat([_values(pack) for pack in packs])
    final = torch.cat([pack.rewards for pack in packs])
    places = _Places.of(packs)
    if not places.rows.numel():
        return torch.zeros_like(flat_values), torch.zeros_like(flat_values)
    shape = (final.numel(), int(places.columns.max()) + 1)
    counted = torch.zeros(shape, dtype=torch.bool)
    counted[places] = True
    values, rewards = torch.zeros(shape), torch.zeros(shape)
    values[places] = flat_values[mask]
    last = shape[1] - 1 - counted.flip(1).int().argmax(1)
    rewards[torch.arange(shape[0]), last] = final
    estimates = generalized_advantages(rewards, values, counted, gamma=gamma, lam=lam)
    advantages, returns = (
        torch.zeros_like(flat_values).masked_scatter_(mask, matrix[places]) for matrix in estimates
    )
    return advantages, returns


def _values(pack: MicroBatch) -> Tensor:
    if pack.values is None:
        raise RuntimeError("a micro-batch has no values; call Critic.values first")
    return pack.values


def _whiten(advantages: Tensor, dp_group: dist.ProcessGroup | None) -> Tensor:
    """[counted] fp32 with mean 0 and standard deviation 1 over all ranks of `dp_group`."""
    wide = advantages.double()
    sums = torch.stack([torch.tensor(wide.numel()).double(), wide.sum(), wide.square().sum()])
    if dp_group is not None and dist.get_world_size(dp_group) > 1:
        shared = sums.to(device.current())
        dist.all_reduce(shared, group=dp_group)
        sums = shared.cpu()
    count, total, squares = sums.tolist()
    mean = total / max(count, 1)
    variance = max(squares - count * mean**2, 0.0) / max(count - 1, 1)
    return ((wide - mean) * (variance + WHITENING_EPS) ** -0.5).to(torch.float32)
