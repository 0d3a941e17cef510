"""Exact counts of a set and of each of its problems."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.evaluation.phrases import ALL
from megatron_dapo.evaluation.set_report import Counts, passing_ks, report_set
from megatron_dapo.types import FinishReason, Group
from tests.unit.evaluation.graded import graded_group

TEXTS = ["Answer: 7", "Answer: 07", "Answer: 8", "nothing", "wait, I verify: Answer: 7"]
ENDS: list[FinishReason] = ["stop", "length", "abort"]
SAMPLE = st.tuples(st.sampled_from(TEXTS), st.sampled_from(ENDS))
SETS = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(SAMPLE, min_size=k, max_size=k), min_size=1, max_size=4)
)


def groups_of(problems: list[list[tuple[str, FinishReason]]]) -> list[Group]:
    return [
        graded_group(n, *(text for text, _ in found), ends=tuple(end for _, end in found))
        for n, found in enumerate(problems)
    ]


@given(SETS)
def test_counts_are_those_of_a_loop_over_all_responses(
    problems: list[list[tuple[str, FinishReason]]],
) -> None:
    report = report_set(groups_of(problems))
    flat = [(text, end, index + 1) for row in problems for index, (text, end) in enumerate(row)]
    right = [("7" in text and end != "abort") for text, end, _ in flat]
    assert report.counts == Counts(
        samples=len(flat),
        right=sum(right),
        ungraded=sum(end == "abort" for _, end, _ in flat),
        truncated=sum(end == "length" for _, end, _ in flat),
        unanswered=sum(text == "nothing" or end == "abort" for text, end, _ in flat),
        tokens=sum(tokens for *_, tokens in flat),
    )
    assert report.avg.value == pytest.approx(statistics.fmean(right))
    lengths = sorted(tokens for *_, tokens in flat)
    assert report.lengths.mean == pytest.approx(statistics.fmean(lengths))
    assert (report.lengths.min, report.lengths.max) == (lengths[0], lengths[-1])
    for percent, found in ((50, report.lengths.p50), (95, report.lengths.p95)):
        assert sum(length <= found for length in lengths) >= percent * len(lengths) / 100
        assert sum(length < found for length in lengths) < percent * len(lengths) / 100
    assert report.lengths.mean_right == (
        pytest.approx(
            statistics.fmean(n for (*_, n), good in zip(flat, right, strict=True) if good)
        )
        if any(right)
        else None
    )
    assert report.truncated_share == pytest.approx(report.counts.truncated / len(flat))


@given(SETS)
def test_problems_add_up_to_their_set(problems: list[list[tuple[str, FinishReason]]]) -> None:
    report = report_set(groups_of(problems))
    parts = report.problem_reports
    assert [part.id for part in parts] == [f"p{n}" for n in range(len(problems))]
    for name in Counts.__dataclass_fields__:
        total = sum(getattr(part.counts, name) for part in parts)
        assert getattr(report.counts, name) == total
    assert report.avg.value == pytest.approx(statistics.fmean(part.avg for part in parts))
    if report.maj is not None:
        votes = [part.maj for part in parts if part.maj is not None]
        assert report.maj.value == pytest.approx(statistics.fmean(votes))
    for name, rate in report.phrases.items():
        found = [part.phrases[name] for part in parts if name in part.phrases]
        assert rate.occurrences == sum(part.occurrences for part in found)
        assert rate.responses == sum(part.responses for part in found)


def test_votes_count_equal_answers_together_the_most_frequent_first() -> None:
    report = report_set([graded_group(0, "Answer: 8", "Answer: 07", "Answer: 7", "none")])
    (problem,) = report.problem_reports
    assert list(problem.votes.items()) == [("07", 2), ("8", 1)]
    assert problem.maj == 1.0
    assert problem.answer == "7"


@pytest.mark.parametrize(
    ("k", "expected"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (32, [2, 4, 8, 16, 32])]
)
def test_pass_at_k_is_reported_for_powers_of_two_and_k(k: int, expected: list[int]) -> None:
    assert passing_ks(k) == expected


def test_pass_at_smaller_k_is_unbiased() -> None:
    report = report_set([graded_group(0, "Answer: 7", *["Answer: 8"] * 3)])
    assert report.passed[2].value == pytest.approx(1 - math.comb(3, 2) / math.comb(4, 2))
    assert report.passed[4].value == 1.0


def test_problems_with_different_numbers_of_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        report_set([graded_group(0, "a"), graded_group(1, "a", "b")])
    with pytest.raises(ValueError, match="need one number"):
        report_set([])


def test_reflection_of_right_and_wrong_responses_is_told_apart() -> None:
    right, wrong = "wait, I verify: Answer: 7", "Hold on. Answer: 8"
    report = report_set([graded_group(0, right, "Answer: 7", wrong, "nothing")])
    assert report.phrases_right is not None and report.phrases_wrong is not None
    assert (report.phrases_right["wait"].occurrences, report.phrases_right[ALL].share) == (1, 0.5)
    assert report.phrases_right["hold_on"].occurrences == 0
    assert report.phrases_wrong[ALL].occurrences == report.phrases_wrong["hold_on"].occurrences == 1
    assert report.phrases_wrong[ALL].per_1k_tokens == pytest.approx(1000 / (3 + 4))
    none_right = report_set([graded_group(0, wrong)])
    assert none_right.phrases_right is None
    assert none_right.phrases_wrong == none_right.phrases
