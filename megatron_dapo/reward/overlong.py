"""Soft overlong punishment (DAPO Eq. 13)."""

from __future__ import annotations


def soft_overlong_penalty(
    response_tokens: int,
    *,
    max_response_tokens: int,
    overlong_buffer_tokens: int,
    penalty_factor: float = 1.0,
) -> float:
    """Punishment of a response for its length, 0 .. -penalty_factor (DAPO Eq. 13).

    0 up to max - buffer, then linear down to -penalty_factor at max, and never below. Added to
    the answer's reward, whether right or wrong.

    Args:
        response_tokens: tokens of the response, stop token included, prompt not.
        max_response_tokens: L_max.
        overlong_buffer_tokens: L_cache, the length of the ramp before L_max. 0: no punishment.
        penalty_factor: punishment at L_max and beyond.

    Raises:
        ValueError: the buffer is negative or longer than the limit.
    """
    if not 0 <= overlong_buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"reward.overlong_buffer_tokens={overlong_buffer_tokens} must lie between 0 and "
            f"rollout.max_response_tokens={max_response_tokens}: the ramp ends at the limit"
        )
    if overlong_buffer_tokens == 0:
        return 0.0
    free_tokens = max_response_tokens - overlong_buffer_tokens
    excess = min(max(response_tokens - free_tokens, 0), overlong_buffer_tokens)
    return -penalty_factor * excess / overlong_buffer_tokens if excess else 0.0
