from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.batch.advantages import generalized_advantages, group_advantages
from tests.unit.handed import Case, handed_cases


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("case", handed_cases("c", "group_advantage"))
def test_handed_advantages(case: Case, unbiased: bool) -> None:
    given_, expect = case["input"], case["expect"]
    result = group_advantages(
        torch.tensor(given_["rewards"]),
        torch.tensor(given_["group"]),
        valid=torch.tensor(given_["valid"]) if "valid" in given_ else None,
        normalize_std=given_["divide_by_std"],
        unbiased=unbiased,
        eps=given_["eps"],
    ).tolist()
    expected = expect["adv_sample_std" if unbiased else "adv_population_std"]
    assert result == pytest.approx([value or 0.0 for value in expected], abs=case["tol"])
    assert max(map(abs, result)) <= expect.get("max_abs", math.inf)
    assert max(map(abs, result)) < expect.get("max_abs_below", math.inf)


def reference(
    rewards: list[float], groups: list[int], valid: list[bool], *, std: bool, unbiased: bool
) -> list[float]:
    out = [0.0] * len(rewards)
    for group in set(groups):
        rows = [i for i, g in enumerate(groups) if g == group and valid[i]]
        values = [rewards[i] for i in rows]
        if len(rows) < 2 or max(values) - min(values) <= 1e-6:
            continue
        spread = statistics.stdev(values) if unbiased else statistics.pstdev(values)
        for i in rows:
            out[i] = (rewards[i] - statistics.fmean(values)) / (spread + 1e-6 if std else 1.0)
    return out


MEMBERS = st.lists(
    st.tuples(st.sampled_from([-2.0, -1.0, -0.3, 0.1, 1.0]), st.integers(0, 4), st.booleans()),
    min_size=1,
    max_size=40,
)


@settings(deadline=None)
@given(MEMBERS, st.booleans(), st.booleans(), st.randoms())
def test_advantages_are_the_textbook_s_in_any_order(
    members: list[tuple[float, int, bool]], std: bool, unbiased: bool, rng: object
) -> None:
    rng.shuffle(members)  # type: ignore[attr-defined]
    rewards, groups, valid = (list(column) for column in zip(*members, strict=True))
    result = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups),
        valid=torch.tensor(valid),
        normalize_std=std,
        unbiased=unbiased,
    )
    expected = reference(rewards, groups, valid, std=std, unbiased=unbiased)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float32))


@settings(deadline=None)
@given(MEMBERS)
def test_advantages_of_a_group_sum_to_zero(members: list[tuple[float, int, bool]]) -> None:
    rewards, groups, valid = (list(column) for column in zip(*members, strict=True))
    result = group_advantages(
        torch.tensor(rewards), torch.tensor(groups), valid=torch.tensor(valid)
    )
    sums = torch.zeros(5).index_add_(0, torch.tensor(groups), result)
    assert sums.abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(size: int, dtype: torch.dtype) -> None:
    for reward in [-1.4, 0.1, 1 / 3, -1 - 511 / 4096, 1e6 + 0.1]:
        rewards = torch.full((size,), reward, dtype=dtype)
        assert group_advantages(rewards, torch.zeros(size, dtype=torch.int64)).eq(0).all()


def test_a_spread_below_the_tolerance_is_no_signal() -> None:
    rewards = torch.tensor([1.0, 1.0 + 1e-7, 1.0], dtype=torch.float64)
    groups = torch.zeros(3, dtype=torch.int64)
    assert group_advantages(rewards, groups, eps=0.0).eq(0).all()


def test_a_rejected_member_may_have_no_reward_at_all() -> None:
    rewards = torch.tensor([math.nan, 1.0, 0.0, math.inf])
    valid = torch.tensor([False, True, True, False])
    result = group_advantages(rewards, torch.zeros(4, dtype=torch.int64), valid=valid)
    assert result.tolist() == pytest.approx([0.0, 0.7071058, -0.7071058, 0.0], abs=1e-6)


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] is nan"):
        group_advantages(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))


def test_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[responses\]"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[batch, seq\]"):
        generalized_advantages(torch.zeros(3), torch.zeros(3), torch.zeros(3), gamma=1.0, lam=1.0)


def test_no_responses_have_no_advantages() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def reference_gae(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The textbook recursion over the counted tokens alone."""
    counted = [t for t, keep in enumerate(mask) if keep]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(counted):
        for j in range(i, len(counted)):
            u = counted[j]
            following = values[counted[j + 1]] if j + 1 < len(counted) else 0.0
            delta = rewards[u] + gamma * following - values[u]
            advantages[t] += (gamma * lam) ** (j - i) * delta
        returns[t] = advantages[t] + values[t]
    return advantages, returns


TOKENS = st.lists(
    st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=1, max_size=12
)


@settings(deadline=None)
@given(TOKENS, st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_skips_masked_tokens(
    tokens: list[tuple[float, float, bool]], gamma: float, lam: float
) -> None:
    rewards, values, mask = (list(column) for column in zip(*tokens, strict=True))
    keep = torch.tensor([mask])
    garbage = torch.where(keep, 0.0, math.nan)
    result = generalized_advantages(
        torch.tensor([rewards]) + garbage,
        torch.tensor([values]) + garbage,
        keep,
        gamma=gamma,
        lam=lam,
    )
    expected = reference_gae(rewards, values, mask, gamma, lam)
    for got, want in zip(result, expected, strict=True):
        torch.testing.assert_close(got, torch.tensor([want]), atol=1e-5, rtol=1e-5)


def test_with_lambda_one_the_return_is_the_sum_of_later_rewards() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, -1.0]])
    values = torch.rand(2, 3)
    _, returns = generalized_advantages(
        rewards, values, torch.ones(2, 3, dtype=torch.bool), gamma=1.0, lam=1.0
    )
    expected = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0]])
    torch.testing.assert_close(returns, expected)


def test_advantages_carry_no_gradient() -> None:
    rewards = torch.tensor([1.0, -1.0], requires_grad=True)
    assert not group_advantages(rewards, torch.zeros(2, dtype=torch.int64)).requires_grad
