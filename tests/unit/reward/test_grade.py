from __future__ import annotations

import logging

import pytest

from megatron_dapo.config.schema import RewardConfig
from megatron_dapo.reward.grade import grade_response, grading_errors
from megatron_dapo.types import FinishReason, Group, Prompt, Response, Reward
from tests.unit.reward import plugins

PROMPT = Prompt("p1", "p text", (1, 2), "7", source="unit")
CONFIG = RewardConfig(overlong_buffer_tokens=4)


def response(text: str, tokens: int = 2, finish: FinishReason = "stop") -> Response:
    return Response("p1", 3, (5,) * tokens, (0.0,) * tokens, finish, 0, 0, text)


def grade(answer: Response, config: RewardConfig = CONFIG, **options: object) -> Reward:
    return grade_response(PROMPT, answer, config, max_response_tokens=10, **options)  # type: ignore[arg-type]


def test_accuracy_and_shaping_stay_two_numbers() -> None:
    right, wrong = grade(response("Answer: 7", 8)), grade(response("Answer: 8", 10))
    assert (right.accuracy, right.score, right.overlong, right.shaped) == (1.0, 1.0, -0.5, 0.5)
    assert (wrong.accuracy, wrong.score, wrong.overlong, wrong.shaped) == (0.0, -1.0, -1.0, -2.0)
    assert (right.extracted, wrong.extracted) == ("7", "8")


def test_every_option_of_the_reward_flips_an_outcome() -> None:
    line, box = response("Answer: 07"), response("so \\boxed{7}")
    assert grade(line).accuracy == 1.0
    assert grade(line, CONFIG.model_copy(update={"style": "boxed"})).accuracy == 0.0
    assert grade(box, CONFIG.model_copy(update={"style": "boxed"})).accuracy == 1.0
    assert grade(box).accuracy == 0.0
    assert grade(box, CONFIG.model_copy(update={"style": "either"})).accuracy == 1.0
    assert grade(line, CONFIG.model_copy(update={"style": "dapo_reference"})).accuracy == 0.0
    assert grade(line, CONFIG.model_copy(update={"correct": 2.0})).score == 2.0
    assert grade(box, CONFIG.model_copy(update={"incorrect": 0.0})).score == 0.0
    long = response("Answer: 7", 10)
    assert grade(long, CONFIG.model_copy(update={"overlong_penalty": 0.5})).overlong == -0.5
    assert grade(long, CONFIG.model_copy(update={"overlong_buffer_tokens": 0})).overlong == 0.0


def test_an_aborted_response_is_not_graded() -> None:
    assert grade(response("Answer: 7", finish="abort")).accuracy is None


def test_a_plugin_s_number_is_the_score_and_full_reward_is_right() -> None:
    graded = [grade(response(text, 8), plugin=plugins.echo) for text in ("1", "0.5", "-1")]
    assert [reward.score for reward in graded] == [1.0, 0.5, -1.0]
    assert [reward.accuracy for reward in graded] == [1.0, 0.0, 0.0]
    assert [reward.overlong for reward in graded] == [-0.5] * 3


def test_a_plugin_s_parts_are_summed_and_kept() -> None:
    reward = grade(response("7"), plugin=plugins.parts)
    assert (reward.accuracy, reward.score) == (1.0, -0.25)
    assert reward.parts == {"form": 0.25, "brief": -0.5}
    assert grade(response("7"), plugin=plugins.only_accuracy).score == 1.0
    assert grade(response("8"), plugin=plugins.only_accuracy).score == -1.0
    half = grade(response("8"), plugin=plugins.half_right)
    assert (half.accuracy, half.score) == (0.5, -1.0)


def test_a_plugin_sees_the_texts_and_the_facts() -> None:
    assert grade(response("r text"), plugin=plugins.describe).accuracy == 1.0


@pytest.mark.parametrize("text", ["not a number", "nan", "inf"])
def test_a_failing_plugin_means_not_graded_and_is_counted(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = (response(text), response("1"), response("x", finish="abort"))
    with caplog.at_level(logging.ERROR):
        rewards = tuple(grade(answer, plugin=plugins.echo) for answer in answers)
    assert [reward.accuracy for reward in rewards] == [None, 1.0, None]
    assert grading_errors([Group(PROMPT, answers, rewards)]) == 1
    assert "response 3 of prompt p1" in caplog.text
