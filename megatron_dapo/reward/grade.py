"""One response -> one Reward: accuracy and shaping as separate numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

from megatron_dapo.config.schema import RewardConfig
from megatron_dapo.reward.math_answer import verify_answer
from megatron_dapo.reward.overlong import soft_overlong_penalty
from megatron_dapo.reward.plugin import RewardFunction, RewardMeta
from megatron_dapo.types import Group, Prompt, Response, Reward

logger = logging.getLogger(__name__)
NOT_GRADED = Reward(accuracy=None, score=0.0)
"""Of an aborted response, or one whose grader failed: outside statistics, filters and loss."""


def grade_response(
    prompt: Prompt,
    response: Response,
    config: RewardConfig,
    *,
    max_response_tokens: int,
    plugin: RewardFunction | None = None,
) -> Reward:
    """Accuracy, score and overlong punishment of one response (DAPO Eq. 7 and 13).

    An aborted response, and one whose plug-in raises or returns no finite number, is not graded:
    accuracy None, never a silent 0. `grading_errors` counts the latter.

    Args:
        prompt: with the ground truth.
        response: with its decoded text.
        config: rule, values and length shaping.
        max_response_tokens: L_max of Eq. 13.
        plugin: from `load_plugin`; replaces the math rule.

    Raises:
        ValueError: the overlong buffer is longer than the limit.
    """
    if response.finish_reason == "abort":
        return NOT_GRADED
    overlong = soft_overlong_penalty(
        len(response.token_ids),
        max_response_tokens=max_response_tokens,
        overlong_buffer_tokens=config.overlong_buffer_tokens,
        penalty_factor=config.overlong_penalty,
    )
    if plugin is None:
        check = verify_answer(response.text, prompt.answer, style=config.style)
        score = config.correct if check.correct else config.incorrect
        return Reward(float(check.correct), score, overlong, extracted=check.extracted)
    meta = RewardMeta(
        prompt_id=prompt.id,
        source=prompt.source,
        sample_index=response.sample_index,
        response_tokens=len(response.token_ids),
        max_response_tokens=max_response_tokens,
        finish_reason=response.finish_reason,
    )
    try:
        result = plugin(prompt.text, response.text, prompt.answer, meta)
        return _reward_of(result, overlong, config)
    except Exception:
        logger.exception(
            "reward.plugin failed on response %d of prompt %s; it is not graded",
            response.sample_index,
            prompt.id,
        )
        return NOT_GRADED


def _reward_of(
    result: float | Mapping[str, float], overlong: float, config: RewardConfig
) -> Reward:
    """Reward of a plug-in's answer; see `RewardFunction` for the rule."""
    named = dict(result) if isinstance(result, Mapping) else {"score": result}
    values = {str(name): float(value) for name, value in named.items()}
    if not values or not all(math.isfinite(value) for value in values.values()):
        raise ValueError(f"a reward function must return finite numbers, not {result!r}")
    accuracy = values.pop("accuracy", None)
    score = sum(values.values())
    if not values:
        score = config.correct if accuracy == 1.0 else config.incorrect
    if accuracy is None:
        accuracy = float(score >= config.correct)
    parts = values if isinstance(result, Mapping) else {}
    return Reward(accuracy, score, overlong, parts=parts)


def grading_errors(groups: Iterable[Group]) -> int:
    """Responses whose grader failed: not graded although they were not aborted."""
    return sum(
        reward.accuracy is None and response.finish_reason != "abort"
        for group in groups
        for response, reward in zip(group.responses, group.rewards, strict=True)
    )
