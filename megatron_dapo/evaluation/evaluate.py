"""Graded samples of held-out prompts -> the numbers that are reported, per data set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from megatron_dapo.evaluation.estimators import avg_at_k, maj_at_k, pass_at_k
from megatron_dapo.types import Group

UNNAMED = "heldout"
"""Data set of prompts whose rows name none."""


def evaluation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`val-core/<set>/acc/mean@k` and, for k > 1, `best@k` and `maj@k`; lengths beside them.

    A response that was not graded counts as wrong here: an evaluation has no second draw.
    Without any extracted answer (a reward plug-in grades) there is no vote and no `maj@k`.

    Args:
        groups: every prompt with its k graded responses; problems are told apart by prompt id.
    """
    by_source: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.prompt.source or UNNAMED].append(group)
    metrics: dict[str, float] = {}
    for source, members in by_source.items():
        metrics |= _of_one_set(source, members)
    return metrics


def _of_one_set(source: str, groups: Sequence[Group]) -> dict[str, float]:
    pairs = [
        (group.prompt.id, response, reward)
        for group in groups
        for response, reward in zip(group.responses, group.rewards, strict=True)
    ]
    ids = [prompt_id for prompt_id, _, _ in pairs]
    correct = [reward.accuracy or 0.0 for _, _, reward in pairs]
    extracted = [reward.extracted for _, _, reward in pairs]
    k = len(groups[0].responses)
    core = f"val-core/{source}/acc"
    average = avg_at_k(ids, correct)
    metrics = {
        f"{core}/mean@{k}": average.value,
        f"{core}/mean@{k}/standard_error": average.problem_error,
        f"val-aux/{source}/response_length/mean": _mean(len(r.token_ids) for _, r, _ in pairs),
        f"val-aux/{source}/response_length/clip_ratio": _mean(
            r.finish_reason == "length" for _, r, _ in pairs
        ),
    }
    if k > 1:
        metrics[f"{core}/best@{k}"] = pass_at_k(ids, correct, k).value
        if any(answer is not None for answer in extracted):
            metrics[f"{core}/maj@{k}"] = maj_at_k(ids, extracted, correct, k).value
    return metrics


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
