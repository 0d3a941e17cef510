"""How often an engine may be restarted, and how long to wait before it is."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_WAIT_SECONDS = 1.0
"""Before the first restart; doubled for each one after it."""
STEPS_TO_REFILL = 10
"""Rollout steps without a loss, after which all restarts are forgotten."""


@dataclass
class RestartBudget:
    """Of one engine. What keeps dying must end the run and not the patience of its owner."""

    allowed: int
    """`rollout.max_restarts`"""
    spent: int = 0
    _steps: int = 0
    """Steps since the last restart."""

    def spend(self) -> float | None:
        """Take one restart: seconds to wait before it. None: there is none left."""
        if self.spent == self.allowed:
            return None
        self.spent += 1
        self._steps = 0
        return FIRST_WAIT_SECONDS * 2 ** (self.spent - 1)

    def step_done(self) -> None:
        """The engine has served a whole rollout step."""
        self._steps += 1
        if self._steps >= STEPS_TO_REFILL:
            self.spent = 0
