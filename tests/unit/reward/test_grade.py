from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron_dapo.config.schema import RewardConfig
from megatron_dapo.reward.grade import grade_response, grading_errors
from megatron_dapo.reward.grader_pool import GraderPool
from megatron_dapo.types import FinishReason, Group, Prompt, Response, Reward

PROMPT = Prompt("p1", "p text", (1, 2), "7", source="unit")
CONFIG = RewardConfig(overlong_buffer_tokens=4)


def response(text: str, tokens: int = 2, finish: FinishReason = "stop") -> Response:
    return Response("p1", 3, (5,) * tokens, (0.0,) * tokens, finish, 0, 0, text)


def grade(answer: Response, config: RewardConfig = CONFIG) -> Reward:
    return grade_response(PROMPT, answer, config, max_response_tokens=10)


def grade_all(folder: Path, answers: list[Response], **options: object) -> list[Reward]:
    """Rewards by a plug-in or math-verify, in a worker."""
    config = CONFIG.model_copy(update={"workers": 1, **options})
    pool = GraderPool(config, folder)
    pool.start()
    try:
        return [
            grade_response(PROMPT, answer, config, max_response_tokens=10, pool=pool)
            for answer in answers
        ]
    finally:
        pool.close()


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


PLUGINS = "tests.unit.reward.plugins:"


def test_a_plugin_s_number_is_the_score_and_full_reward_is_right(tmp_path: Path) -> None:
    answers = [response(text, 8) for text in ("1", "0.5", "-1")]
    graded = grade_all(tmp_path, answers, plugin=PLUGINS + "echo")
    assert [reward.score for reward in graded] == [1.0, 0.5, -1.0]
    assert [reward.accuracy for reward in graded] == [1.0, 0.0, 0.0]
    assert [reward.overlong for reward in graded] == [-0.5] * 3
    assert [reward.parts for reward in graded] == [{}] * 3


def test_a_plugin_s_parts_are_summed_and_kept(tmp_path: Path) -> None:
    reward = grade_all(tmp_path, [response("7")], plugin=PLUGINS + "parts")[0]
    assert (reward.accuracy, reward.score) == (1.0, -0.25)
    assert reward.parts == {"form": 0.25, "brief": -0.5}
    answers = [response("7"), response("8")]
    graded = grade_all(tmp_path, answers, plugin=PLUGINS + "only_accuracy")
    assert [reward.score for reward in graded] == [1.0, -1.0]
    half = grade_all(tmp_path, [response("8")], plugin=PLUGINS + "half_right")[0]
    assert (half.accuracy, half.score) == (0.5, -1.0)


def test_a_plugin_sees_the_texts_and_the_facts(tmp_path: Path) -> None:
    graded = grade_all(tmp_path, [response("r text")], plugin=PLUGINS + "describe")
    assert graded[0].accuracy == 1.0


@pytest.mark.parametrize("text", ["not a number", "nan", "inf"])
def test_a_failing_plugin_means_not_graded_and_is_counted(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [response(text), response("1"), response(text), response("x", finish="abort")]
    with caplog.at_level(logging.ERROR):
        rewards = grade_all(tmp_path, answers, plugin=PLUGINS + "echo")
    assert [reward.accuracy for reward in rewards] == [None, 1.0, None, None]
    assert grading_errors([Group(PROMPT, tuple(answers), tuple(rewards))]) == 2
    assert len(caplog.records) == 1 and "ValueError" in caplog.text


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ('{"accuracy": -1, "form": 1}', "accuracy=-1"),
        ('{"accuracy": 1.5}', "between 0, wrong, and 1, right"),
        ('{"score": 1, "acc": 1}', "is called 'accuracy'"),
        ('{"accuracy": 1, "predicted": "12"}', "must return numbers, not '12'"),
        ('"1"', "must return numbers, not '1'"),
        ("null", "TypeError"),
        ("[1.0]", "TypeError"),
        ("{}", "finite numbers"),
        ('{"accuracy": 1, "overlong": -0.5}', "reward/overlong/mean is a metric of ours"),
    ],
)
def test_parts_that_would_be_taken_for_something_else_are_refused(
    parts: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [response(parts), response('{"accuracy": 0.5, "form": 0.25}')]
    with caplog.at_level(logging.ERROR):
        refused, taken = grade_all(tmp_path, answers, plugin=PLUGINS + "named")
    assert refused.accuracy is None and told in caplog.text
    assert (taken.accuracy, taken.score, taken.parts) == (0.5, 0.25, {"form": 0.25})


SAME_VALUE = {  # response's last line -> right for the truth 7?
    "Answer: 7": True,
    r"Answer: $\sqrt{49}$": True,
    r"Answer: $2^{3}-1$": True,
    r"Answer: $\frac{14}{2}$": True,
    "Answer: 8": False,
    r"Answer: $2^{3}+1$": False,
    r"Answer: 7 or 8": False,
    "Answer: ${7": False,
    "no answer": False,
}


def test_math_verify_decides_what_is_no_number_to_us(tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="the extra megatron_dapo[math] is not installed")
    graded = grade_all(tmp_path, [response(text) for text in SAME_VALUE], math_verify=True)
    assert [reward.accuracy for reward in graded] == [float(r) for r in SAME_VALUE.values()]
    assert grade(response(r"Answer: $\sqrt{49}$")).accuracy == 0.0


def test_only_a_miss_that_could_be_right_goes_to_math_verify() -> None:
    """Without a pool: what would be asked fails."""
    config = CONFIG.model_copy(update={"math_verify": True})
    for text in ("Answer: 7", "Answer: 8", "none", "Answer: 7, 8", "Answer: " + "9" * 2000):
        assert grade(response(text), config).accuracy == float(text == "Answer: 7")
    with pytest.raises(AssertionError, match="pool"):
        grade(response("Answer: x+1"), config)
