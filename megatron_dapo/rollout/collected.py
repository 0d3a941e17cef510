"""What the sampling of one step came to: which groups train, and where all prompts went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.config.schema import SamplingConfig
from megatron_dapo.rollout.draft import Draft
from megatron_dapo.rollout.rollout_metrics import response_metrics
from megatron_dapo.rollout.selection import FilterCounts, NotEnoughGroups, right_histogram
from megatron_dapo.types import Group


@dataclass(frozen=True)
class Tally:
    """Numbers of one step that no group carries."""

    carried_in: int = 0
    """Usable groups of earlier steps that this one began with."""
    carried_out: int = 0
    """Usable groups that wait for a later step."""
    put_back: int = 0
    """Prompts that come again, since they lie behind the last group that is trained on."""
    discarded_valid: int = 0
    """Usable groups of those prompts: dropped, since the step was full before."""
    discarded_stale: int = 0
    """Usable groups that became older than rollout.max_staleness."""
    discarded_unfinished: int = 0
    """Groups that were ended for good before they were complete, and whose prompt is not put back:
    sampling.max_seconds was over."""
    discarded_unfinished_tokens: int = 0
    """Tokens of groups that were ended for good before they were complete."""
    continued: int = 0
    """Responses that went on where an earlier interruption had left them."""
    tokens: int = 0
    """Sampled for the step, whatever became of them."""
    keep_rate: float = 1.0
    """Share of groups that are expected to be of mixed accuracy, after the step."""
    seconds: float = 0.0
    """By the event loop's clock."""


@dataclass(frozen=True)
class Collected:
    """A step that is ready to be trained on, or as near to it as it got."""

    step: int
    kept: tuple[Draft, ...]
    generated: tuple[Group, ...]
    """Complete groups that were read, in the order of their prompts; carried ones were in an
    earlier step's."""
    counts: FilterCounts
    tally: Tally
    timed_out: bool = False


def collected_metrics(collected: Collected, round_prompts: int) -> dict[str, float]:
    """Metrics by name, without those that depend on when the step is trained on.

    Args:
        collected: the step.
        round_prompts: prompts that make one generation round.
    """
    counts, tally = collected.counts, collected.tally
    trained = sum(draft.tokens for draft in collected.kept)
    metrics = {
        "filter/num_gen_batches": float(math.ceil(len(collected.generated) / round_prompts)),
        "filter/generated": float(len(collected.generated)),
        "filter/kept": float(counts.kept),
        "filter/drop_all_right": float(counts.all_right),
        "filter/drop_all_wrong": float(counts.all_wrong),
        "filter/drop_ungraded": float(counts.ungraded),
        "filter/discarded_valid": float(tally.discarded_valid),
        "filter/discarded_stale": float(tally.discarded_stale),
        "filter/discarded_unfinished": float(tally.discarded_unfinished),
        "filter/discarded_unfinished_tokens": float(tally.discarded_unfinished_tokens),
        "filter/put_back": float(tally.put_back),
        "filter/carried_in": float(tally.carried_in),
        "filter/carried_out": float(tally.carried_out),
        "filter/continued": float(tally.continued),
        "filter/keep_rate": tally.keep_rate,
        "rollout/tokens_generated": float(tally.tokens),
        "rollout/tokens_per_trained_token": tally.tokens / max(trained, 1),
    }
    if tally.seconds > 0:
        metrics["rollout/tokens_per_second"] = tally.tokens / tally.seconds
    return metrics | response_metrics(collected.generated)


def shortage(collected: Collected, target: int, sampling: SamplingConfig) -> NotEnoughGroups:
    """The error that a step with too few groups ends in, or the warning that it goes on with."""
    return NotEnoughGroups(
        target,
        sampling.max_rounds,
        collected.counts,
        right_histogram(collected.generated),
        sampling.max_seconds if collected.timed_out else None,
        trains=sampling.when_short == "train",
    )


def drafts_of(groups: Sequence[Group], drafts: Sequence[Draft]) -> tuple[Draft, ...]:
    """Those of `drafts` that made `groups`, in order."""
    chosen = {id(group) for group in groups}
    return tuple(draft for draft in drafts if id(draft.group) in chosen)
