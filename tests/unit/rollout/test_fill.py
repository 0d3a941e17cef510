"""How many prompts a step asks for, and when."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.rollout.draft import Draft
from megatron_dapo.rollout.fill import Fill
from megatron_dapo.rollout.keep_rate import KeepRate
from megatron_dapo.types import Prompt, Response, Reward

HALF = KeepRate(0.5, steps=9)


def fill(need: int, *, by_prefix: bool, rate: KeepRate = HALF) -> Fill:
    return Fill(
        step=1,
        version=0,
        need=need,
        target=need,
        most=100 * need,
        rate=rate,
        first_wave=None,
        dynamic=True,
        by_prefix=by_prefix,
        started=0.0,
    )


def draw(filling: Fill, count: int) -> None:
    first = len(filling.drafts)
    prompt = Prompt("p", "", (3,), "1")
    filling.drafts += [Draft.new(prompt, 1, first + n, 0, 2) for n in range(count)]


def end(filling: Fill, index: int, *, mixed: bool) -> None:
    """Both responses of a draft are graded."""
    draft = filling.drafts[index]
    for member in draft.members:
        member.response = Response("p", member.index, (7, 2), (-1.0, -1.0), "stop", 0, 5)
        member.reward = Reward(float(mixed and member.index), 0.0)
    assert draft.close_when_complete()
    filling.note(draft)


def test_a_step_that_carries_asks_for_two_standard_deviations_more() -> None:
    assert fill(100, by_prefix=False).missing() == 200
    # 200 groups have a standard deviation of 7.07 mixed ones: 115 are to be expected
    assert fill(100, by_prefix=True).missing() == 230


def test_a_wave_of_an_unknown_keep_rate_is_what_is_needed() -> None:
    assert fill(100, by_prefix=True, rate=KeepRate()).missing() == 100


def test_what_comes_as_it_was_expected_asks_for_no_second_wave() -> None:
    filling = fill(100, by_prefix=True)
    draw(filling, filling.missing())
    for index in range(230):
        end(filling, index, mixed=index % 2 == 0)
        assert filling.missing() == 0
    assert filling.full


def test_a_prefix_that_falls_short_asks_once_and_for_enough() -> None:
    filling = fill(100, by_prefix=True)
    draw(filling, filling.missing())
    asked = []
    for index in range(60):
        end(filling, index, mixed=False)
        if more := filling.missing():
            asked.append(more)
            draw(filling, more)
    assert 1 <= len(asked) <= 4
    assert asked[0] > 10


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), rate=st.sampled_from([0.2, 0.5, 0.8]))
def test_the_order_of_endings_changes_no_wave_of_a_step_that_carries(
    seed: int, rate: float
) -> None:
    """Also where many end before the next look at what is missing."""

    def submitted(order_seed: int) -> int:
        chance, order = random.Random(seed), random.Random(order_seed)
        verdicts: list[bool] = []
        filling = fill(20, by_prefix=True, rate=KeepRate(rate, steps=3))
        open_drafts: list[int] = []
        while True:
            more = filling.missing()
            first = len(filling.drafts)
            draw(filling, more)
            verdicts += [chance.random() < rate for _ in range(more)]
            open_drafts += range(first, first + more)
            if not open_drafts:
                return len(filling.drafts)
            for _ in range(order.randint(1, len(open_drafts))):
                index = open_drafts.pop(order.randrange(len(open_drafts)))
                end(filling, index, mixed=verdicts[index])

    assert len({submitted(order_seed) for order_seed in range(4)}) == 1


def test_a_second_wave_is_rare() -> None:
    again = 0
    for run in range(200):
        chance = random.Random(run)
        filling = fill(200, by_prefix=True)
        draw(filling, filling.missing())
        first, index = len(filling.drafts), 0
        while not filling.full:
            end(filling, index, mixed=chance.random() < 0.5)
            index += 1
            draw(filling, filling.missing())
        again += len(filling.drafts) > first
    assert again < 50
