"""Graded samples of held-out prompts become the numbers that a run logs."""

from __future__ import annotations

import pytest

from megatron_dapo.evaluation.evaluate import evaluation_metrics, ungraded_responses
from megatron_dapo.evaluation.set_report import report_set
from megatron_dapo.reward.grade import NOT_GRADED
from megatron_dapo.types import Group, Reward
from tests.unit.evaluation.graded import graded_group


def metrics_of(**sets: Group) -> dict[str, float]:
    return evaluation_metrics({name: report_set([group]) for name, group in sets.items()})


def test_sets_are_told_apart() -> None:
    metrics = metrics_of(aime=graded_group(1, "Answer: 7"), sums=graded_group(1, "Answer: 8"))
    assert metrics["val-core/aime/acc/mean@1"] == 1.0
    assert metrics["val-core/sums/acc/mean@1"] == 0.0
    assert not [name for name in metrics if "best@" in name or "maj@" in name]
    assert not [name for name in metrics if "sampling_error" in name]


def test_several_samples_give_average_best_and_majority() -> None:
    metrics = metrics_of(aime=graded_group(1, "Answer: 8", "Answer: 7", "Answer: 07"))
    assert metrics["val-core/aime/acc/mean@3"] == pytest.approx(2 / 3)
    assert metrics["val-core/aime/acc/best@3"] == 1.0
    assert metrics["val-aux/aime/acc/best@2"] == 1.0
    assert metrics["val-core/aime/acc/maj@3"] == 1.0
    assert metrics["val-core/aime/acc/mean@3/sampling_error"] == pytest.approx((2 / 27) ** 0.5)
    assert metrics["val-aux/aime/response_length/mean"] == 2.0


def test_responses_without_an_answer_outvote_nobody() -> None:
    metrics = metrics_of(aime=graded_group(1, "Answer: 7", "I do not know", "nor do I"))
    assert metrics["val-core/aime/acc/maj@3"] == 1.0


def test_where_nothing_is_extracted_there_is_no_majority() -> None:
    voted = graded_group(1, "a", "b")
    metrics = metrics_of(code=Group(voted.prompt, voted.responses, (Reward(1.0, 1.0), NOT_GRADED)))
    assert metrics["val-core/code/acc/mean@2"] == 0.5
    assert metrics["val-aux/code/ungraded"] == 1.0
    assert "val-core/code/acc/maj@2" not in metrics


def test_reflection_and_truncation_are_logged() -> None:
    group = graded_group(1, "Wait, no.", "Let me verify. wait", ends=("length", "stop"))
    metrics = metrics_of(aime=group)
    assert metrics["val-aux/aime/reflection/per_response"] == 1.5
    assert metrics["val-aux/aime/reflection/share"] == 1.0
    assert metrics["val-aux/aime/reflection/per_1k_tokens"] == 1000.0
    assert metrics["val-aux/aime/response_length/clip_ratio"] == 0.5


def test_responses_that_nobody_graded_are_told_in_one_line_with_the_reason() -> None:
    failed = graded_group(1, "a", "b", "c", ends=("stop", "abort", "stop"))
    failed = Group(failed.prompt, failed.responses, (NOT_GRADED, NOT_GRADED, Reward(1.0, 1.0)))
    aborted = graded_group(2, "Answer: 7", "", ends=("stop", "abort"))
    whole = [graded_group(3, "Answer: 7")]
    groups = {"code": [failed], "sums": whole, "aime": [aborted]}
    assert ungraded_responses(groups, ["raised: KeyError: 'x'", "time_limit: 10 s"]) == (
        "code: 2 of 3 responses were not graded and count as wrong (the grader failed on 1, 1 were "
        "aborted); aime: 1 of 2 responses were not graded and count as wrong (the grader failed on "
        "0, 1 were aborted); graders said first: raised: KeyError: 'x', time_limit: 10 s"
    )
    assert ungraded_responses({"sums": whole}, ["raised: of a training step"]) == ""
    assert "said" not in ungraded_responses({"aime": [aborted]}, ["raised: of a training step"])
