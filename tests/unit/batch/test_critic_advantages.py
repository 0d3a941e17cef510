"""Advantages of packed responses, against the recursion on each response alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_dapo.batch.advantages import generalized_advantages
from megatron_dapo.batch.critic_advantages import critic_advantages
from megatron_dapo.batch.packing import context_slice, pack_update, split_updates
from megatron_dapo.types import MicroBatch, RolloutBatch
from tests.unit.batch.batches import random_batch

LENGTHS = [(3, 4), (2, 1), (5, 7), (1, 2), (4, 3), (2, 5), (3, 1), (2, 2)]
GAMMA, LAM = 0.9, 0.8


def packed(batch: RolloutBatch, *, budget: int, cp_size: int = 1) -> list[list[MicroBatch]]:
    """Two updates, with values that are NaN wherever no token counts."""
    return [
        [
            _with_values(pack)
            for pack in pack_update(
                batch,
                rows,
                dp_rank=0,
                dp_size=1,
                tokens_per_micro_batch=budget,
                pad_multiple=4,
                min_micro_batches=2,
                cp_size=cp_size,
            )
        ]
        for rows in split_updates(batch, 4)
    ]


def _with_values(pack: MicroBatch) -> MicroBatch:
    row = pack.rows[pack.sequence_index] if pack.num_sequences else torch.zeros(1)
    values = torch.sin(0.3 * row + 0.7 * pack.position_ids)
    return pack.replace(values=torch.where(pack.loss_mask, values, math.nan))


def reference(batch: RolloutBatch) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Row -> whitened advantages, row -> returns, in the order of the response's tokens."""
    raw, returns = {}, {}
    for row, (prompt, response) in enumerate(LENGTHS):
        if not batch.trained[row]:
            continue
        position = torch.arange(prompt - 1, prompt + response - 1)
        values = torch.sin(0.3 * torch.tensor(float(row)) + 0.7 * position)[None]
        rewards = torch.zeros_like(values)
        rewards[0, -1] = batch.rewards[row]
        everywhere = torch.ones_like(values, dtype=torch.bool)
        estimates = generalized_advantages(rewards, values, everywhere, gamma=GAMMA, lam=LAM)
        raw[row], returns[row] = (estimate[0] for estimate in estimates)
    flat = torch.cat(list(raw.values())).double()
    whitened = {row: (own.double() - flat.mean()) / flat.std() for row, own in raw.items()}
    return whitened, returns


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("budget", [16, 64])
def test_packing_changes_no_advantage(budget: int, cp_size: int) -> None:
    batch = random_batch(LENGTHS, seed=1)
    assert 2 < int(batch.trained.sum()) < len(LENGTHS)
    advantages, returns = reference(batch)
    seen = set()
    for update in critic_advantages(
        packed(batch, budget=budget, cp_size=cp_size), gamma=GAMMA, lam=LAM
    ):
        for pack in update:
            assert pack.returns is not None
            for number, row in enumerate(pack.rows.tolist()):
                mine = pack.loss_mask & (pack.sequence_index == number)
                if row in advantages:
                    seen.add(row)
                    torch.testing.assert_close(pack.advantages[mine].double(), advantages[row])
                    torch.testing.assert_close(pack.returns[mine], returns[row])
            assert (pack.advantages[~pack.loss_mask] == 0).all()
            assert (pack.returns[~pack.loss_mask] == 0).all()
    assert seen == advantages.keys()


def test_a_response_that_does_not_train_has_no_part_in_the_statistics() -> None:
    batch = random_batch(LENGTHS, seed=1)
    out = ~batch.trained
    assert out.any()
    spoiled = replace(batch, rewards=torch.where(out, math.nan, batch.rewards))
    clean, other = (
        critic_advantages(packed(one, budget=64), gamma=GAMMA, lam=LAM) for one in (batch, spoiled)
    )
    for a, b in zip(clean, other, strict=True):
        for left, right in zip(a, b, strict=True):
            assert torch.equal(left.advantages, right.advantages)
            assert left.returns is not None and right.returns is not None
            assert torch.equal(left.returns, right.returns)


def test_equal_advantages_become_zero() -> None:
    batch = random_batch([(1, 1)] * 4)
    batch = replace(batch, rewards=torch.full((4,), 0.3), trained=torch.ones(4, dtype=torch.bool))
    pack = packed(batch, budget=64)[0][0]
    same = pack.replace(values=torch.zeros(pack.num_tokens))
    ((filled,),) = critic_advantages([[same]], gamma=1.0, lam=1.0)
    assert filled.advantages.abs().max() < 1e-3
    assert filled.returns is not None
    torch.testing.assert_close(filled.returns[pack.loss_mask].unique(), torch.tensor([0.3]))


def test_a_step_in_which_nothing_counts_has_only_zeros() -> None:
    batch = random_batch(LENGTHS)
    batch = replace(batch, trained=torch.zeros(len(LENGTHS), dtype=torch.bool))
    for update in critic_advantages(packed(batch, budget=64), gamma=1.0, lam=1.0):
        for pack in update:
            assert pack.returns is not None
            assert not pack.advantages.any() and not pack.returns.any()


def test_context_ranks_share_values_and_returns_and_keep_all_rewards() -> None:
    update = packed(random_batch(LENGTHS, seed=1), budget=64, cp_size=2)[0]
    ((whole, *_),) = critic_advantages([update], gamma=GAMMA, lam=LAM)
    assert whole.returns is not None
    parts = [context_slice(whole, rank, 2) for rank in range(2)]
    assert torch.equal(parts[0].rewards, whole.rewards)
    slices = [part.returns for part in parts if part.returns is not None]
    assert sorted(torch.cat(slices).tolist()) == sorted(whole.returns.tolist())


def test_packs_without_values_are_refused() -> None:
    batch = random_batch(LENGTHS)
    bare = [[pack.replace(values=None) for pack in update] for update in packed(batch, budget=64)]
    with pytest.raises(RuntimeError, match=r"call Critic\.values first"):
        critic_advantages(bare, gamma=1.0, lam=1.0)
