"""One response -> one Reward: accuracy and shaping as separate numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from megatron_dapo.config.schema import RewardConfig
from megatron_dapo.reward.grader_pool import GraderPool
from megatron_dapo.reward.math_answer import may_be_equal, verify_answer
from megatron_dapo.reward.overlong import soft_overlong_penalty
from megatron_dapo.reward.plugin import RewardMeta
from megatron_dapo.types import Group, Prompt, Response, Reward

NOT_GRADED = Reward(accuracy=None, score=0.0)
"""Of an aborted response, or one whose grader failed: outside statistics, filters and loss."""


def grade_response(
    prompt: Prompt,
    response: Response,
    config: RewardConfig,
    *,
    max_response_tokens: int,
    pool: GraderPool | None = None,
) -> Reward:
    """Accuracy, score and overlong punishment of one response (DAPO Eq. 7 and 13).

    From any thread. An aborted response, and one whose call in the pool came to nothing (it raised,
    passed a limit, ended its worker or returned no finite number), is not graded: accuracy None,
    never a silent 0. `grading_errors` counts the latter.

    Args:
        prompt: with the ground truth.
        response: with its decoded text.
        config: rule, values and length shaping.
        max_response_tokens: L_max of Eq. 13.
        pool: where `reward.plugin` or math-verify runs; not needed without both.

    Raises:
        ValueError: the overlong buffer is longer than the limit.
        GraderStartError: no worker can be started any more, or the pool is closed.
    """
    if response.finish_reason == "abort":
        return NOT_GRADED
    overlong = soft_overlong_penalty(
        len(response.token_ids),
        max_response_tokens=max_response_tokens,
        overlong_buffer_tokens=config.overlong_buffer_tokens,
        penalty_factor=config.overlong_penalty,
    )
    if config.plugin is None:
        return _math_reward(prompt, response, overlong, config, pool)
    assert pool is not None, "reward.plugin runs in a pool"
    meta = RewardMeta(
        prompt_id=prompt.id,
        source=prompt.source,
        sample_index=response.sample_index,
        response_tokens=len(response.token_ids),
        max_response_tokens=max_response_tokens,
        finish_reason=response.finish_reason,
    )
    texts = {"prompt": prompt.text, "response": response.text, "answer": prompt.answer}
    reply = pool.call({**texts, "meta": asdict(meta)})
    if not isinstance(reply.value, Mapping):
        return NOT_GRADED
    return _plugin_reward(reply.value, overlong, config)


def _math_reward(
    prompt: Prompt,
    response: Response,
    overlong: float,
    config: RewardConfig,
    pool: GraderPool | None,
) -> Reward:
    """By our own check here, and on a miss by math-verify in the pool, where it is asked for."""
    check = verify_answer(response.text, prompt.answer, style=config.style)
    correct: bool | None = check.correct
    if config.math_verify and may_be_equal(check, prompt.answer):
        assert pool is not None, "math-verify runs in a pool"
        value = pool.call({"truth": prompt.answer, "answer": check.extracted}).value
        correct = value if isinstance(value, bool) else None
    if correct is None:
        return NOT_GRADED
    score = config.correct if correct else config.incorrect
    return Reward(float(correct), score, overlong, extracted=check.extracted)


def _plugin_reward(parts: Mapping[str, float], overlong: float, config: RewardConfig) -> Reward:
    """Reward of a plug-in's answer; see `RewardFunction` for the rule. A bare number is part ""."""
    values = dict(parts)
    accuracy = values.pop("accuracy", None)
    score = sum(values.values())
    if not values:
        score = config.correct if accuracy == 1.0 else config.incorrect
    if accuracy is None:
        accuracy = float(score >= config.correct)
    return Reward(accuracy, score, overlong, parts={k: v for k, v in values.items() if k})


def grading_errors(groups: Iterable[Group]) -> int:
    """Responses whose grader failed: not graded although they were not aborted."""
    return sum(
        reward.accuracy is None and response.finish_reason != "abort"
        for group in groups
        for response, reward in zip(group.responses, group.rewards, strict=True)
    )
