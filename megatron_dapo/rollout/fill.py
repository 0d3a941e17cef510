"""How far the sampling of one step is, and how many prompts it still needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_dapo.rollout.draft import Draft
from megatron_dapo.rollout.keep_rate import KeepRate, missing_prompts, spare_groups


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
            A refill is then late, and costs the time of one more longest response, while what is
            too much is carried on: each wave asks for `spare_groups` more.
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
    prefix_wants: int = 0
    """Drafts that are to be there, as far as the prefixes so far say: at first those of the first
    wave, and more once that lets expect too few."""

    def note(self, draft: Draft) -> None:
        """One more draft is complete."""
        if self.complete == 0:
            self.prefix_wants = len(self.drafts)
        self.complete += 1
        self.usable += is_usable(draft, self.dynamic)
        while self.prefix < len(self.drafts) and not self.full:
            following = self.drafts[self.prefix]
            if following.group is None:
                break
            self.prefix += 1
            self.prefix_usable += is_usable(following, self.dynamic)
            if not self.full:  # looks at every prefix, also where several drafts end at once
                self._look_at_prefix()

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
        room = self.most - len(self.drafts)
        if not self.drafts and self.first_wave is not None and not self.full:
            return min(self.first_wave, room)
        if self.by_prefix and self.drafts:
            return min(max(self.prefix_wants - len(self.drafts), 0), room)
        if self.full or (self.drafts and not self.complete):
            return 0  # the first wave tells nothing yet
        in_flight = len(self.drafts) - self.complete
        return min(self._missing(self.complete, self.usable, in_flight, self.by_prefix), room)

    def _look_at_prefix(self) -> None:
        """A wave is asked for where too few are to be expected, and is then as safe as the first:
        asking for safety at every prefix would bring small waves until late."""
        if self.prefix + self._missing(self.prefix, self.prefix_usable, 0) > self.prefix_wants:
            more = self._missing(self.prefix, self.prefix_usable, 0, safely=True)
            self.prefix_wants = self.prefix + more

    def _missing(self, complete: int, usable: int, in_flight: int, safely: bool = False) -> int:
        if not self.dynamic:
            return max(self.need - usable - in_flight, 0)
        rate = self.rate.within(usable, complete, self.target)
        need = self.need
        if safely:
            need += math.ceil(spare_groups(math.ceil((need - usable) / rate), rate))
        return missing_prompts(need, usable, in_flight, rate)


def is_usable(draft: Draft, dynamic: bool) -> bool:
    """True for a complete group that may train: of mixed accuracy, or any without the filter."""
    return draft.group is not None and (draft.group.mixed or not dynamic)
