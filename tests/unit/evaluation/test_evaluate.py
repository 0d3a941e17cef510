"""Graded samples of held-out prompts become numbers for each data set."""

from __future__ import annotations

import pytest

from megatron_dapo.config.schema import RewardConfig
from megatron_dapo.evaluation.evaluate import evaluation_metrics
from megatron_dapo.reward.grade import NOT_GRADED, grade_response
from megatron_dapo.types import Group, Prompt, Response, Reward


def group(number: int, source: str, *texts: str) -> Group:
    """Samples of one problem whose answer is 7, graded as the published grader does."""
    prompt = Prompt(f"p{number}", "", (1,), "7", source)
    responses = tuple(
        Response(prompt.id, index, (5,) * (index + 1), (0.0,) * (index + 1), "stop", 0, 0, text)
        for index, text in enumerate(texts)
    )
    config = RewardConfig(style="dapo_reference", overlong_buffer_tokens=0)
    rewards = tuple(
        grade_response(prompt, response, config, max_response_tokens=9) for response in responses
    )
    return Group(prompt, responses, rewards)


def test_sets_are_told_apart_and_a_nameless_one_is_heldout() -> None:
    metrics = evaluation_metrics([group(1, "aime", "Answer: 7"), group(2, "", "Answer: 8")])
    assert metrics["val-core/aime/acc/mean@1"] == 1.0
    assert metrics["val-core/heldout/acc/mean@1"] == 0.0
    assert not [name for name in metrics if "best@" in name or "maj@" in name]


def test_several_samples_give_average_best_and_majority() -> None:
    metrics = evaluation_metrics([group(1, "aime", "Answer: 8", "Answer: 7", "Answer: 7")])
    assert metrics["val-core/aime/acc/mean@3"] == pytest.approx(2 / 3)
    assert metrics["val-core/aime/acc/best@3"] == 1.0
    assert metrics["val-core/aime/acc/maj@3"] == 1.0
    assert metrics["val-aux/aime/response_length/mean"] == 2.0


def test_responses_without_an_answer_outvote_nobody() -> None:
    metrics = evaluation_metrics([group(1, "aime", "Answer: 7", "I do not know", "nor do I")])
    assert metrics["val-core/aime/acc/maj@3"] == 1.0


def test_where_nothing_is_extracted_there_is_no_majority() -> None:
    voted = group(1, "code", "a", "b")
    by_plugin = Group(voted.prompt, voted.responses, (Reward(1.0, 1.0), NOT_GRADED))
    metrics = evaluation_metrics([by_plugin])
    assert metrics["val-core/code/acc/mean@2"] == 0.5
    assert "val-core/code/acc/maj@2" not in metrics
