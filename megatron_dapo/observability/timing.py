"""Where the seconds of a step go: named phases that add up to the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Clock of one step on this rank, started when it is built.

    Args:
        clock: in seconds.
        notify: called with the name of each phase that begins.

    Device work counts where the host waits for it: a phase that ends without a
    synchronisation passes its unfinished work on to the next.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        notify: Callable[[str], None] = lambda _phase: None,
    ) -> None:
        self._clock = clock
        self._notify = notify
        self._started = clock()
        self._seconds: dict[str, float] = {}
        self._running: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `name`. Phases do not nest: each second counts once."""
        assert self._running is None, f"phase {name!r} starts inside phase {self._running!r}"
        self._running = name
        self._notify(name)
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started
            self._running = None

    def phases(self) -> dict[str, float]:
        """timing_s/<phase> of the phases alone, for work outside the step such as evaluation."""
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}

    def values(self) -> dict[str, float]:
        """timing_s/<phase> of each phase, and timing_s/other, which sum to timing_s/step."""
        step = self._clock() - self._started
        other = step - sum(self._seconds.values())
        return self.phases() | {"timing_s/other": other, "timing_s/step": step}
