"""Where the commands write: a terminal in its own width, a pipe or a log in a fixed one."""

from __future__ import annotations

from rich.console import Console

PLAIN_WIDTH = 110
"""Columns when the output is not a terminal, so that logs read the same everywhere."""


def open_console() -> Console:
    """The console on standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
