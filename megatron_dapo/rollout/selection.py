"""Dynamic sampling's rule, as a pure function: which groups of which rounds are trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_dapo.config.errors import RunFailed
from megatron_dapo.types import Group


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
    """Usable groups beyond the target: carried on to the next step, or dropped."""

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


NOTHING_TO_TRAIN_ON = (
    "Without one there is no gradient to train on, so the run stops with sampling.when_short=train "
    "too. "
)


class NotEnoughGroups(RunFailed):
    """Dynamic sampling found too few groups of mixed accuracy. `counts` says on which side.

    Args:
        target: groups that were wanted.
        rounds: that were generated.
        counts: where the groups went.
        histogram: groups by their number of right responses.
        seconds: sampling.max_seconds, where that was what ended the step.
        trains: the step takes what there is (sampling.when_short=train), if there is anything.
    """

    def __init__(
        self,
        target: int,
        rounds: int,
        counts: FilterCounts,
        histogram: Mapping[int, int] | None = None,
        seconds: float | None = None,
        *,
        trains: bool = False,
    ) -> None:
        bound = f"{rounds} rounds (sampling.max_rounds)"
        if seconds is not None:
            bound = f"{seconds:g} seconds (sampling.max_seconds)"
        spread = ", ".join(f"{right}: {groups}" for right, groups in (histogram or {}).items())
        told = f" Groups by number of right responses: {spread}." if spread else ""
        none = "" if counts.kept else NOTHING_TO_TRAIN_ON
        super().__init__(
            f"only {counts.kept} of {target} groups of mixed accuracy after {bound}: {counts}."
            f"{told} {none}{_cause_and_cure(counts, by_time=seconds is not None, trains=trains)}"
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


def right_histogram(groups: Iterable[Group]) -> dict[int, int]:
    """Number of right responses of a group -> groups with that many, in order."""
    rights = Counter(
        sum(reward.accuracy is not None and reward.accuracy >= 1 for reward in group.rewards)
        for group in groups
    )
    return dict(sorted(rights.items()))


def _verdict(group: Group) -> str:
    graded = [r.accuracy for r in group.rewards if r.accuracy is not None]
    if not graded:
        return "ungraded"
    return "right" if graded[0] >= 1 else "wrong"  # partial credit is not right


def _cause_and_cure(counts: FilterCounts, *, by_time: bool, trains: bool) -> str:
    if counts.ungraded > max(counts.all_wrong, counts.all_right):
        return (
            "Responses were aborted or reward.plugin failed on them, as the messages above say; "
            "mend that first"
        )
    accept = ", or take what there is with sampling.when_short=train"
    if trains or not counts.kept:
        accept = ""
    if by_time and counts.all_wrong + counts.all_right <= counts.kept:
        return f"Generation is too slow for that limit; raise sampling.max_seconds{accept}"
    bound = "sampling.max_seconds" if by_time else "sampling.max_rounds"
    level = "hard" if counts.all_wrong >= counts.all_right else "easy"
    return (
        f"The prompts are too {level} for this policy, or the grader does not find its answers; "
        f"change data.train or raise {bound}{accept}"
    )
