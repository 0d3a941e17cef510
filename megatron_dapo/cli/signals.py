"""Signals that ask a command to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def leaving_through_clean_up() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the process as Ctrl-C does: through its clean-up."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
