"""A request to save and stop: made by a signal to any rank, heard by all of them.

SIGTERM and SIGUSR1 both ask for it. A rank may sit in a collective when they come, where Python
runs no signal handler: a thread of its own hears them through the wake-up descriptor, tells the
others through the store that the ranks met at, and looks there for what others heard.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_dapo.config.errors import EXIT_PREEMPTED

logger = logging.getLogger(__name__)

SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})
POLL_SECONDS = 0.25
LEAVE_SECONDS = 3.0
"""What a rank gets to leave by itself, and to see that all others know."""
ASKED, HEARD = "stop/asked", "stop/heard"


class StopRequest:
    """One rank's ear. Before `started` a request ends the process: there is nothing to save yet.

    From then on it only is set, and interrupts what waits for rollouts; the ranks agree at points
    of the step (`agreed`), save and leave together. Asking again changes nothing.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._running = False
        self._leaving = False
        self._interrupt: Callable[[], None] | None = None
        self._store: dist.Store | None = None
        self._ear: socket.socket | None = None
        """Kept open: later signals are still written to its other end."""
        self._thread: threading.Thread | None = None
        self._world_size = 1

    def listen(self) -> None:
        """Hear signals from now on; those that came blocked are heard too. Main thread only."""
        ear, mouth = socket.socketpair()
        mouth.setblocking(False)
        ear.settimeout(POLL_SECONDS)
        self._ear = ear
        signal.set_wakeup_fd(mouth.detach(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._leave)
        self._thread = threading.Thread(
            target=self._watch, args=(ear,), name="stop request", daemon=True
        )
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def share(self, store: dist.Store, world_size: int) -> None:
        """Once all ranks have met at `store`: hear the others, and tell them."""
        self._world_size = world_size
        self._store = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it

    def started(self, interrupt: Callable[[], None] | None = None) -> None:
        """From here on there is something to save.

        Args:
            interrupt: called once, from another thread, when a request comes: ends what this rank
                waits for (generation) early.
        """
        with self._lock:
            self._interrupt = interrupt
            self._running = True
        if self.is_set() and interrupt is not None:
            interrupt()

    def set(self) -> None:
        """Ask on this rank, as a signal does."""
        self._asked.set()

    def is_set(self) -> bool:
        """True once this rank knows of a request; others may know later: see `agreed`."""
        return self._asked.is_set()

    def agreed(self, group: ProcessGroup) -> bool:
        """True on every rank once one was asked. Collective: one integer over `group`."""
        return on_any_rank(self.is_set(), group)

    def close(self) -> None:
        """The run is over: later requests must not change its exit code. Main thread only.

        The thread ends here: one that Python's own end finds inside the store aborts the process.
        """
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._ended.set()
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)

    def _watch(self, ear: socket.socket) -> None:
        while not (self._hears_signal(ear) or self._asked.is_set() or self._hears_others()):
            if self._ended.is_set():
                return
        with self._lock:
            self._asked.set()
            running, interrupt = self._running, self._interrupt
        self._tell()
        logger.warning("asked to save and stop")
        if not running:
            self._make_leave()
        elif interrupt is not None:
            interrupt()

    def _hears_signal(self, ear: socket.socket) -> bool:
        try:
            return not SIGNALS.isdisjoint(ear.recv(64))
        except TimeoutError:
            return False

    def _hears_others(self) -> bool:
        if self._store is None:
            return False
        try:
            return self._store.check([ASKED])
        except dist.DistError:  # the rank that serves the store has ended
            self._ended.set()
            return False

    def _tell(self) -> None:
        if self._store is None:
            return
        try:
            self._store.set(ASKED, "1")
            self._store.add(HEARD, 1)
        except dist.DistError as error:
            logger.warning("asked to stop, and could not tell the other ranks: %s", error)

    def _make_leave(self) -> None:
        """End a process that has not begun: by its handler, or where that cannot run, at once.

        What a rank 0 that ends at once has started, guardians and the kernel end.
        """
        main = threading.main_thread().ident
        assert main is not None, "the main thread runs"
        signal.pthread_kill(main, signal.SIGUSR1)
        ended = self._ended.wait(LEAVE_SECONDS)
        if not (ended or self._leaving or self._running):
            os._exit(EXIT_PREEMPTED)

    def _leave(self, _number: int, _frame: FrameType | None) -> None:
        if self._running or self._leaving:
            return
        self._leaving = True
        logger.warning("no step has begun: there is nothing new to save")
        self._wait_until_heard()
        raise SystemExit(EXIT_PREEMPTED)

    def _wait_until_heard(self) -> None:
        """Rank 0 takes the store along, and others that lose it would end as crashed."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._store is not None and time.monotonic() < deadline:
            try:
                if self._store.add(HEARD, 0) >= self._world_size:
                    return
            except dist.DistError:
                return
            time.sleep(POLL_SECONDS / 5)


def on_any_rank(here: bool, group: ProcessGroup) -> bool:
    """True on every rank of `group` where it is on one. Collective: one integer."""
    there = torch.tensor(int(here))
    dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
    return bool(there)


class SignalsHeld:
    """Processes started inside inherit these signals as blocked: SLURM signals them all.

    This process still hears them, through the thread of its StopRequest.
    """

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
