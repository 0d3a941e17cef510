"""Errors that are told without a traceback, and the exit codes of a process."""

from __future__ import annotations

from collections.abc import Iterable

EXIT_DONE = 0
EXIT_PREEMPTED = 75
"""Saved and stopped before the end; the same command goes on from there."""
EXIT_FAILED = 1
"""The run could not go on. The same command goes on from the newest checkpoint."""
EXIT_CONFIG = 78
"""Configuration or data is wrong: starting again would not help. Any other code is a crash."""


class RunFailed(RuntimeError):
    """What ended a run, and what to do, in words that need no traceback; the process exits with 1.

    For what a healthy program meets: a full disk, engines that keep dying, prompts that are too
    hard. A broken invariant is no such thing.
    """


class ConfigError(ValueError):
    """Key, value seen, what is allowed and what to do; the command line exits with 78.

    Raised in seconds, before any model is built. `problems` holds one message each.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))
