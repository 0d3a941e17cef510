"""Dynamic sampling's rule, as a pure function: which groups of which rounds are trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.types import Group

LARGEST_ROUND = 3
"""Most prompts of a refill round, in targets (the reference draws 3 x 512 prompts at once)."""


@dataclass(frozen=True, slots=True)
class FilterCounts:
    """Where the generated groups went; the last five add up to the first."""

    generated: int
    kept: int
    all_right: int
    all_wrong: int
    ungraded: int
    """No member was graded: every response was aborted or its grader failed."""
    surplus: int
    """Usable groups beyond the target, dropped."""

    def __str__(self) -> str:
        return (
            f"{self.generated} groups generated: {self.kept} kept, {self.all_right} all right, "
            f"{self.all_wrong} all wrong, {self.ungraded} not graded, {self.surplus} surplus"
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups to train on, in the order in which their prompts were submitted."""

    kept: tuple[Group, ...]
    counts: FilterCounts
    rounds_used: int


class NotEnoughGroups(RuntimeError):
    """Dynamic sampling found too few groups of mixed accuracy. `counts` says on which side."""

    def __init__(self, target: int, rounds: int, counts: FilterCounts) -> None:
        super().__init__(
            f"only {counts.kept} of {target} groups of mixed accuracy after {rounds} rounds "
            f"(sampling.max_rounds): {counts}. {_cause_and_cure(counts)}"
        )
        self.counts = counts


def select_groups(
    rounds: Sequence[Sequence[Group]], target: int, *, dynamic: bool = True
) -> Selection:
    """The first `target` usable groups, and what became of the others (DAPO Eq. 11).

    A group is usable when its graded accuracies differ. Shaped rewards play no part: an all-wrong
    group with different length penalties carries no signal about the answer. An aborted member
    has no accuracy, so it never makes a group mixed. Whole rounds are read in submission order;
    taking the groups that finished first would prefer short ones.

    Args:
        rounds: groups of each generation round, in submission order. Rounds behind the one that
            fills the target are not read.
        dynamic: False keeps every group.
    """
    usable: list[Group] = []
    read: list[Group] = []
    used = 0
    for round_groups in rounds:
        if len(usable) >= target:
            break
        used += 1
        read += round_groups
        usable += [group for group in round_groups if group.mixed or not dynamic]
    verdicts = [_verdict(group) for group in read if dynamic and not group.mixed]
    counts = FilterCounts(
        generated=len(read),
        kept=min(len(usable), target),
        all_right=verdicts.count("right"),
        all_wrong=verdicts.count("wrong"),
        ungraded=verdicts.count("ungraded"),
        surplus=max(len(usable) - target, 0),
    )
    return Selection(tuple(usable[:target]), counts, used)


def next_round_prompts(counts: FilterCounts, target: int) -> int:
    """Prompts to draw next: what is missing, scaled by the share of groups kept so far."""
    share = max(counts.kept, 1) / counts.generated
    return min(math.ceil((target - counts.kept) / share), LARGEST_ROUND * target)


def _verdict(group: Group) -> str:
    graded = [r.accuracy for r in group.rewards if r.accuracy is not None]
    if not graded:
        return "ungraded"
    return "right" if graded[0] > 0 else "wrong"


def _cause_and_cure(counts: FilterCounts) -> str:
    if counts.ungraded > max(counts.all_wrong, counts.all_right):
        return (
            "Responses were aborted or reward.plugin failed on them, as the messages above say; "
            "mend that first"
        )
    level = "hard" if counts.all_wrong >= counts.all_right else "easy"
    accept = ", or take what there is with sampling.when_short=train" if counts.kept else ""
    return (
        f"The prompts are too {level} for this policy, or the grader does not find its answers; "
        f"change data.train or raise sampling.max_rounds{accept}"
    )
