"""How many of the groups that are sampled turn out to be of mixed accuracy: what refills ask."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 0.5
"""Weight of the newest step in the running estimate."""
FIRST_WEIGHT = 1 / 16
"""Of a guess that nothing was measured for yet, in groups for each group of the target."""
LEAST = 1e-3
ROUNDING = 1e-9
LARGEST_WAVE = 3
"""Most groups in flight, in targets: a wild estimate is no reason to flood the engines."""
SPARE_DEVIATIONS = 2.0
"""Standard deviations of the number of mixed groups that a schedule which carries groups on leaves
for chance. One leaves a step in six on the wrong side, and the rate itself is an estimate."""


@dataclass(frozen=True, slots=True)
class KeepRate:
    """Share of mixed groups: of earlier steps, and with those of the running one.

    Before anything is measured it is 1: the first wave draws what is needed, and learns.
    """

    value: float = 1.0
    steps: int = 0
    """That it was measured in."""

    def within(self, mixed: int, complete: int, target: int) -> float:
        """The estimate in the middle of a step, of whose groups `mixed` of `complete` were mixed.

        Earlier steps weigh as much as `target` groups, a guess hardly anything.
        """
        weight = target if self.steps else max(1.0, FIRST_WEIGHT * target)
        return max(LEAST, (mixed + weight * self.value) / (complete + weight))

    def learn(self, mixed: int, complete: int) -> KeepRate:
        """The estimate after a step."""
        if complete == 0:
            return self
        share = mixed / complete
        value = share if self.steps == 0 else self.value + MEMORY * (share - self.value)
        return KeepRate(max(LEAST, value), self.steps + 1)


def missing_prompts(need: int, mixed: int, in_flight: int, rate: float) -> int:
    """Prompts to draw now, so that `need` mixed groups are to be expected, and no more.

    Args:
        need: mixed groups that the step must sample.
        mixed: of them there already.
        in_flight: groups that were submitted and are not known yet.
        rate: share of groups that are mixed.
    """
    deficit = need - mixed - rate * in_flight
    if deficit <= 0:
        return 0
    return min(math.ceil(deficit / rate - ROUNDING), max(LARGEST_WAVE * need - in_flight, 0))


def spare_groups(unknown: int, rate: float) -> float:
    """By how many the mixed ones among `unknown` groups may well miss what is to be expected.

    Args:
        unknown: groups that were submitted and are not known yet.
        rate: share of groups that are mixed.
    """
    return SPARE_DEVIATIONS * math.sqrt(unknown * rate * (1 - rate))
