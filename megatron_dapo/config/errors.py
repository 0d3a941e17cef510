"""The one error of a configuration that cannot be run."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """Key, value seen, what is allowed and what to do; the command line exits with 78.

    Raised in seconds, before any model is built. `problems` holds one message each.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))
