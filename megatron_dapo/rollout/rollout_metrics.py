"""Numbers of one rollout step, under the names that verl's curves carry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_dapo.types import Group


def response_metrics(generated: Sequence[Group]) -> dict[str, float]:
    """Metrics of all responses of `generated` by name; {} without any group.

    Rewards and lengths speak of the dropped groups too: among the kept ones the accuracy says more
    of the filter than of the policy. Rewards count graded responses only; a mean of nothing is
    left out.
    """
    responses = [response for group in generated for response in group.responses]
    if not responses:
        return {}
    lengths = np.array([len(response.token_ids) for response in responses], dtype=np.float64)
    metrics = {
        "response_length/mean": lengths.mean().item(),
        "response_length/max": lengths.max().item(),
        "response_length/min": lengths.min().item(),
        "response_length/p95": np.percentile(lengths, 95).item(),
        "response_length/clip_ratio": _share(r.finish_reason == "length" for r in responses),
        "response/aborted_ratio": _share(r.finish_reason == "abort" for r in responses),
        "rollout/mixed_version_responses": float(sum(len(r.version_spans) > 1 for r in responses)),
        "prompt_length/mean": float(np.mean([len(g.prompt.token_ids) for g in generated])),
    }
    return metrics | _reward_metrics(generated)


def staleness_metrics(groups: Sequence[Group], policy_version: int) -> dict[str, float]:
    """How many versions the oldest token of each trained response is behind `policy_version`."""
    ages = [policy_version - r.policy_version for group in groups for r in group.responses]
    ages = [max(age, 0) for age in ages]  # an update may have come after the step was asked for
    return {
        "rollout/staleness/mean": float(np.mean(ages)),
        "rollout/staleness/max": float(max(ages)),
    }


def _reward_metrics(generated: Sequence[Group]) -> dict[str, float]:
    seen: defaultdict[str, list[float]] = defaultdict(list)
    for group in generated:
        for reward in group.rewards:
            if reward.accuracy is None:
                continue
            seen["reward/acc/mean"].append(reward.accuracy)
            seen["reward/mean"].append(reward.shaped)
            seen["reward/overlong/mean"].append(reward.overlong)
            for name, value in reward.parts.items():
                seen[f"reward/{name}/mean"].append(value)
    return {name: float(np.mean(values)) for name, values in seen.items()}


def _share(flags: Iterable[bool]) -> float:
    return float(np.mean(list(flags)))
