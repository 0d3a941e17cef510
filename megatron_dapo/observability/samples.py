"""Responses as flat records for people to read."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dapo.types import Group, Response, Reward


def spread(groups: Sequence[Group], count: int) -> list[tuple[Group, int]]:
    """Up to `count` responses, as group and member, at equal distances over all of them."""
    everyone = [(group, member) for group in groups for member in range(len(group.responses))]
    if count == 1 or len(everyone) <= count:
        return everyone[:count]
    last = len(everyone) - 1
    return [everyone[round(last * pick / (count - 1))] for pick in range(count)]


def sample_row(step: int, group: Group, response: Response, reward: Reward) -> dict[str, object]:
    """One flat record for people to read."""
    return {
        "step": step,
        "prompt_id": group.prompt.id,
        "sample_index": response.sample_index,
        "prompt": group.prompt.text,
        "response": response.text,
        "answer": group.prompt.answer,
        "extracted": reward.extracted,
        "accuracy": reward.accuracy,
        "reward": reward.shaped,
        "reward/score": reward.score,
        "reward/overlong": reward.overlong,
        **{f"reward/{name}": value for name, value in reward.parts.items()},
        "response_tokens": len(response.token_ids),
        "finish_reason": response.finish_reason,
        "policy_version": response.policy_version,
        "version_spans": [list(span) for span in response.version_spans],
    }
