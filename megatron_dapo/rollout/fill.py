"""How far the sampling of one step is, and how many prompts it still needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_dapo.rollout.draft import Draft
from megatron_dapo.rollout.keep_rate import KeepRate, missing_prompts


@dataclass
class Fill:
    """The drafts of one step in the order of their prompts.

    The *prefix* are the first drafts, all complete, up to the one that fills the step: which
    groups it holds depends on prompts and seeds alone, never on what was finished first.

    Args:
        need: usable groups that the step still has to sample.
        target: groups that it trains on; `need` and those that were carried in.
        most: drafts at most.
        first_wave: prompts of the first wave; None: what the keep rate lets expect.
        dynamic: False: every group is usable.
        by_prefix: refills are asked for by the prefix alone, so that also which prompts were
            submitted does not depend on timing. Else by all complete groups, which is sooner.
    """

    step: int
    version: int
    need: int
    target: int
    most: int
    rate: KeepRate
    first_wave: int | None
    dynamic: bool
    by_prefix: bool
    started: float
    """By the event loop's clock."""
    drafts: list[Draft] = field(default_factory=list)
    complete: int = 0
    usable: int = 0
    prefix: int = 0
    """Length of the prefix so far."""
    prefix_usable: int = 0

    def note(self, draft: Draft) -> None:
        """One more draft is complete."""
        self.complete += 1
        self.usable += is_usable(draft, self.dynamic)
        while self.prefix < len(self.drafts) and not self.full:
            following = self.drafts[self.prefix]
            if following.group is None:
                break
            self.prefix += 1
            self.prefix_usable += is_usable(following, self.dynamic)

    @property
    def full(self) -> bool:
        """The prefix holds what the step needs."""
        return self.prefix_usable >= self.need

    @property
    def exhausted(self) -> bool:
        """All that may be sampled is there."""
        return self.complete == len(self.drafts) >= self.most

    def missing(self) -> int:
        """Prompts to draw now."""
        if self.full:
            return 0
        room = self.most - len(self.drafts)
        if not self.drafts and self.first_wave is not None:
            return min(self.first_wave, room)
        if not self.dynamic:
            return min(self.need - len(self.drafts), room)
        known, mixed = (
            (self.prefix, self.prefix_usable) if self.by_prefix else (self.complete, self.usable)
        )
        if self.drafts and not known:  # the first wave tells nothing yet
            return 0
        rate = self.rate.within(mixed, known, self.target)
        return min(missing_prompts(self.need, mixed, len(self.drafts) - known, rate), room)


def is_usable(draft: Draft, dynamic: bool) -> bool:
    """True for a complete group that may train: of mixed accuracy, or any without the filter."""
    return draft.group is not None and (draft.group.mixed or not dynamic)
