"""A slow rank is named after three steps; noise is not."""

from __future__ import annotations

import random

import pytest

from megatron_dapo.observability.straggler import Stragglers


def test_a_rank_that_is_slow_three_steps_in_a_row_is_named_once_each_time() -> None:
    stragglers = Stragglers()
    warnings = [stragglers.judge([1.0, 1.1, 2.9, 1.0])[1] for _ in range(6)]
    assert [bool(text) for text in warnings] == [False, False, True, False, False, True]
    assert "rank 2 needed 2.9 s" in warnings[2]
    assert "the median of the ranks is 1 s" in warnings[2]


def test_of_two_ranks_the_slower_one_is_seen() -> None:
    stragglers = Stragglers()
    assert [stragglers.judge([1.0, 4.0])[0] for _ in range(3)] == [4.0, 4.0, 4.0]
    assert stragglers.judge([4.0, 1.0]) == (4.0, ""), "another rank begins anew"


@pytest.mark.parametrize("scale", [0.001, 0.05, 10.0])
def test_fifty_clean_steps_raise_no_flag(scale: float) -> None:
    noise, stragglers = random.Random(7), Stragglers()
    for _ in range(50):
        assert stragglers.judge([scale * noise.uniform(0.7, 1.3) for _ in range(16)])[1] == ""


def test_a_short_phase_is_no_reason_to_warn() -> None:
    stragglers = Stragglers()
    assert [stragglers.judge([0.01, 0.01, 0.2])[1] for _ in range(5)] == [""] * 5


def test_one_slow_step_between_is_forgotten() -> None:
    stragglers = Stragglers()
    slow, clean = [1.0, 1.0, 3.0], [1.0, 1.0, 1.0]
    assert [stragglers.judge(s)[1] for s in (slow, slow, clean, slow, slow)] == [""] * 5
    assert stragglers.judge(slow)[1]


def test_a_rank_alone_is_no_straggler() -> None:
    assert Stragglers().judge([3.0]) == (1.0, "")
