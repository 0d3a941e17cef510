from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.rollout.keep_rate import LARGEST_WAVE, missing_prompts
from megatron_dapo.rollout.rollout_metrics import response_metrics
from megatron_dapo.rollout.selection import (
    FilterCounts,
    NotEnoughGroups,
    right_histogram,
    select_groups,
)
from megatron_dapo.types import Group, Prompt, Response, Reward
from tests.unit.handed import Case, handed_cases


def group(name: str, accuracies: list[float | None], scores: list[float] | None = None) -> Group:
    scores = scores or [0.0] * len(accuracies)
    return Group(
        prompt=Prompt(name, "", (5,), "1"),
        responses=tuple(
            Response(name, i, (3, 2), (-1.0, -1.0), "abort" if a is None else "stop", 0, i)
            for i, a in enumerate(accuracies)
        ),
        rewards=tuple(
            Reward(accuracy, score) for accuracy, score in zip(accuracies, scores, strict=True)
        ),
    )


@pytest.mark.parametrize("case", handed_cases("d", "select_groups"))
def test_handed_cases(case: Case) -> None:
    given_, expect = case["input"], case["expect"]
    rounds = [
        [group(g["id"], g["acc"], g["reward"]) for g in groups]
        for groups in given_["rounds"][: given_["max_rounds"]]
    ]
    selection = select_groups(rounds, given_["target_groups"])
    counts = selection.counts
    assert [g.prompt.id for g in selection.kept] == expect["kept"]
    assert selection.rounds_used == expect["rounds_used"]
    samples = sum(len(g.responses) for g in selection.kept)
    assert samples == expect.get("train_samples", samples)
    assert samples // given_["data_parallel"] == expect.get("per_rank", samples)
    for name, value in expect.get("counts", {}).items():
        assert getattr(counts, name) == value
    if "raw_acc_mean" in expect:
        read = [g for groups in rounds for g in groups]
        assert response_metrics(read)["reward/acc/mean"] == expect["raw_acc_mean"]
    if "ends_with" in expect:
        message = str(NotEnoughGroups(given_["target_groups"], selection.rounds_used, counts))
        for name, value in expect["message_counts"].items():
            assert f"{value} {name.replace('_', ' ')}" in message


def test_shaped_reward_does_not_make_a_group_usable() -> None:
    selection = select_groups([[group("w", [0.0, 0.0], [-1.0, -1.5])]], 1)
    assert selection.kept == ()
    assert selection.counts.all_wrong == 1


@pytest.mark.parametrize(
    ("accuracies", "field"),
    [
        ([1.0, None], "all_right"),
        ([0.0, None], "all_wrong"),
        ([None, None], "ungraded"),
        ([1.0, 0.0, None], "kept"),
    ],
)
def test_aborted_members_count_for_nothing(accuracies: list[float | None], field: str) -> None:
    counts = select_groups([[group("a", accuracies)]], 1).counts
    assert getattr(counts, field) == 1


def test_partial_credit_is_not_right() -> None:
    """As pass@k and the counts of an evaluation have it."""
    half = group("half", [0.5, 0.5])
    counts = select_groups([[half]], 1).counts
    assert (counts.all_right, counts.all_wrong) == (0, 1)
    assert right_histogram([half, group("one", [1.0, 0.5])]) == {0: 1, 1: 1}


def test_without_dynamic_sampling_constant_groups_stay() -> None:
    groups = [group("a", [1.0, 1.0]), group("b", [0.0, 0.0]), group("c", [0.0, 1.0])]
    assert select_groups([groups], 3, dynamic=False).kept == tuple(groups)


accuracy = st.sampled_from([0.0, 1.0, None])
groups_strategy = st.lists(st.lists(accuracy, min_size=1, max_size=4), max_size=8)


@given(st.lists(groups_strategy, max_size=4), st.integers(1, 6), st.booleans())
def test_every_group_is_accounted_for_once(
    accuracies: list[list[list[float | None]]], target: int, dynamic: bool
) -> None:
    rounds = [
        [group(f"{r}.{i}", members) for i, members in enumerate(groups)]
        for r, groups in enumerate(accuracies)
    ]
    selection = select_groups(rounds, target, dynamic=dynamic)
    counts = selection.counts
    parts = counts.kept + counts.all_right + counts.all_wrong + counts.ungraded + counts.surplus
    assert counts.generated == parts
    assert counts.generated == sum(len(groups) for groups in rounds[: selection.rounds_used])
    assert len(selection.kept) == counts.kept <= target
    order = [g.prompt.id for groups in rounds for g in groups]
    places = [order.index(g.prompt.id) for g in selection.kept]
    assert places == sorted(places)
    if dynamic:
        assert all(g.mixed for g in selection.kept)
    if selection.rounds_used < len(rounds):
        assert counts.kept == target


@given(st.integers(1, 50), st.data())
def test_a_refill_asks_for_what_is_missing_and_no_more(need: int, data: st.DataObject) -> None:
    mixed = data.draw(st.integers(0, need - 1))
    in_flight = data.draw(st.integers(0, 3 * need))
    rate = data.draw(st.floats(0.01, 1.0))
    asked = missing_prompts(need, mixed, in_flight, rate)
    expected = mixed + rate * (in_flight + asked)
    assert 0 <= asked <= max(LARGEST_WAVE * need - in_flight, 0)
    if asked:
        assert expected < need + rate + 1e-6
    if asked < LARGEST_WAVE * need - in_flight:
        assert expected >= need - 1e-6


def test_the_error_names_the_side_and_the_cure() -> None:
    hard = str(NotEnoughGroups(4, 3, FilterCounts(9, 1, 2, 6, 0, 0)))
    easy = str(NotEnoughGroups(4, 3, FilterCounts(9, 1, 6, 2, 0, 0)))
    assert "only 1 of 4" in hard
    assert "too hard" in hard
    assert "too easy" in easy
    assert "or take what there is with sampling.when_short=train" in hard
    assert "no gradient" not in hard


def test_the_error_blames_a_failing_grader_and_never_advises_to_train_on_nothing() -> None:
    ungraded = str(NotEnoughGroups(4, 3, FilterCounts(9, 0, 1, 1, 7, 0)))
    assert "reward.plugin failed" in ungraded
    assert "too hard" not in ungraded
    nothing = str(NotEnoughGroups(4, 3, FilterCounts(9, 0, 0, 9, 0, 0)))
    assert "take what there is with sampling.when_short=train" not in nothing
    assert "so the run stops with sampling.when_short=train too" in nothing


def test_accuracies_that_differ_by_rounding_alone_make_no_group_mixed() -> None:
    assert 0.1 + 0.2 != 0.3
    assert not group("a", [0.1 + 0.2, 0.3, 0.3]).mixed
    assert group("a", [0.3, 0.31, None]).mixed
    assert not group("a", [1.0, None]).mixed
