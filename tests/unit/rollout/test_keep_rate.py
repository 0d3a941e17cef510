"""The running estimate that refills ask."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.rollout.keep_rate import LEAST, KeepRate, spare_groups


def test_the_first_wave_of_a_run_draws_the_target() -> None:
    assert KeepRate().within(0, 0, 512) == 1.0


def test_the_first_steps_own_groups_soon_outweigh_the_guess() -> None:
    assert KeepRate().within(205, 512, 512) == pytest.approx(0.4, abs=0.04)
    assert KeepRate().within(0, 1, 512) > 0.95


def test_later_steps_trust_what_was_measured_against_the_first_few_groups() -> None:
    measured = KeepRate().learn(200, 500)
    assert measured.value == 0.4
    assert measured.within(2, 64, 512) > 0.35
    assert measured.within(400, 500, 512) == pytest.approx((400 + 0.4 * 512) / 1012)


def test_the_estimate_follows_a_change_within_a_few_steps() -> None:
    rate = KeepRate()
    for _ in range(5):
        rate = rate.learn(90, 100)
    for _ in range(5):
        rate = rate.learn(20, 100)
    assert 0.2 < rate.value < 0.25


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8), st.integers(1, 50))
def test_it_is_a_share_that_can_be_divided_by(steps: list[tuple[int, int]], target: int) -> None:
    rate = KeepRate()
    for mixed, others in steps:
        rate = rate.learn(mixed, mixed + others)
        assert LEAST <= rate.value <= 1
        assert LEAST <= rate.within(mixed, mixed + others, target) <= 1


def test_nothing_is_spared_where_every_group_is_mixed_or_none_is_unknown() -> None:
    assert spare_groups(100, 1.0) == 0
    assert spare_groups(0, 0.5) == 0


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("unknown", [50, 500])
def test_hardly_ever_are_more_groups_mixed_than_are_spared(rate: float, unknown: int) -> None:
    bound = rate * unknown + spare_groups(unknown, rate)
    likely = [
        math.comb(unknown, mixed) * rate**mixed * (1 - rate) ** (unknown - mixed)
        for mixed in range(unknown + 1)
    ]
    assert math.fsum(likely) == pytest.approx(1)
    assert 0.002 < math.fsum(likely[math.ceil(bound) :]) < 0.04
