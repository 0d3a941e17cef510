"""The one error of a configuration that cannot be run, and the exit codes of a process."""

from __future__ import annotations

from collections.abc import Iterable

EXIT_DONE = 0
EXIT_PREEMPTED = 75
"""Saved and stopped before the end; the same command goes on from there."""
EXIT_CONFIG = 78
"""Configuration or data is wrong: starting again would not help. Any other code is a crash."""


class ConfigError(ValueError):
    """Key, value seen, what is allowed and what to do; the command line exits with 78.

    Raised in seconds, before any model is built. `problems` holds one message each.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))
