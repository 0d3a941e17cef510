"""Numbers of one rollout step, under the names that verl's curves carry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_dapo.rollout.selection import Selection
from megatron_dapo.types import Group


def rollout_metrics(generated: Sequence[Group], selection: Selection) -> dict[str, float]:
    """Metrics by name.

    Rewards and lengths speak of *all* generated responses, the dropped ones included: among
    the kept groups the accuracy says more of the filter than of the policy. Rewards count graded
    responses only; a mean of nothing is left out.
    """
    counts = selection.counts
    metrics = {
        "filter/num_gen_batches": float(selection.rounds_used),
        "filter/generated": float(counts.generated),
        "filter/kept": float(counts.kept),
        "filter/drop_all_right": float(counts.all_right),
        "filter/drop_all_wrong": float(counts.all_wrong),
        "filter/drop_ungraded": float(counts.ungraded),
        "filter/discarded_valid": float(counts.surplus),
    }
    responses = [response for group in generated for response in group.responses]
    lengths = np.array([len(response.token_ids) for response in responses], dtype=np.float64)
    metrics |= {
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
