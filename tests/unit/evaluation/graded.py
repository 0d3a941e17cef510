"""Graded samples made by hand."""

from __future__ import annotations

from megatron_dapo.config.schema import RewardConfig
from megatron_dapo.reward.grade import grade_response
from megatron_dapo.types import FinishReason, Group, Prompt, Response


def graded_group(
    number: int, *texts: str, answer: str = "7", ends: tuple[FinishReason, ...] = ()
) -> Group:
    """Samples of one problem; the one at index i has i + 1 tokens. An aborted one is not graded."""
    prompt = Prompt(f"p{number}", "", (1,), answer)
    responses = tuple(
        Response(
            prompt_id=prompt.id,
            sample_index=index,
            token_ids=(5,) * (index + 1),
            rollout_logprobs=(0.0,) * (index + 1),
            finish_reason=ends[index] if ends else "stop",
            policy_version=0,
            seed=0,
            text=text,
        )
        for index, text in enumerate(texts)
    )
    config = RewardConfig(overlong_buffer_tokens=0)
    rewards = tuple(
        grade_response(prompt, response, config, max_response_tokens=99) for response in responses
    )
    return Group(prompt, responses, rewards)
