"""An asyncio event loop with simulated time: hours of waiting in the seconds that the work takes.

The clock stands still while anything can run and then jumps to the next timer. The order of events
follows from the code alone, so a run is repeated exactly. What would bring real time in is refused:
sockets, pipes, child processes, calls from other threads. Work for an executor is done at once, in
the loop's own thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

ResultT = TypeVar("ResultT")
ONE_DAY = 86_400.0
TIMER_SLACK = 1e-9
"""Seconds: timers that differ by rounding only fire together."""
MOST_NAMED = 10
REAL_WORLD = (
    "add_reader",
    "add_signal_handler",
    "add_writer",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getaddrinfo",
    "getnameinfo",
    "sendfile",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_sendall",
    "sock_sendfile",
    "sock_sendto",
    "start_tls",
    "subprocess_exec",
    "subprocess_shell",
)
"""Methods of a loop that wait for something outside of the simulation."""


class SimulationError(RuntimeError):
    """The simulation cannot go on; the message names the tasks that wait."""


class RealWorldError(RuntimeError):
    """Simulated code asked for something that takes real time."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop whose `time()` starts at 0 and moves only while nothing is ready.

    Args:
        limit_seconds: simulated time after which the run is taken for stuck: timers that come
            back for ever (heartbeats) would hide a deadlock.
    """

    def __init__(self, limit_seconds: float = 365 * ONE_DAY) -> None:
        super().__init__()
        self._now = 0.0
        self._limit = limit_seconds
        self._clock_resolution = TIMER_SLACK
        self._selector = self
        """`BaseEventLoop` waits by `self._selector.select(timeout)`."""

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._now

    def select(self, timeout: float | None) -> list[object]:
        """In place of waiting for `timeout` seconds: be there.

        Raises:
            SimulationError: nothing is ready and no timer runs, or `limit_seconds` are over.
        """
        if timeout is None:
            raise SimulationError(f"deadlock at {self._now:.3f} s: {self._waiting()}")
        self._now += timeout
        if timeout > 0 and self._now > self._limit:
            raise SimulationError(
                f"not done after {self._limit:g} simulated seconds: {self._waiting()}"
            )
        return []

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., ResultT], *args: object
    ) -> asyncio.Future[ResultT]:
        """Do it now, in no simulated time; `executor` is not used."""
        self._check_closed()
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # belongs to whoever awaits the future
            future.set_exception(error)
        return future

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        """As `call_soon`, from the loop's own thread only."""
        if self._thread_id not in (None, threading.get_ident()):
            raise RealWorldError(
                f"thread {threading.current_thread().name} calls into a simulated loop; when it "
                "does so is not simulated, run that work with run_in_executor"
            )
        return self.call_soon(*args, **kwargs)

    def _process_events(self, event_list: list[object]) -> None:
        assert not event_list, "no event comes from outside"

    def _waiting(self) -> str:
        """The tasks that are not done, those that wait at one place together."""
        places = Counter(_place(task) for task in asyncio.all_tasks(self))
        named = [f"{place} ({count}x)" for place, count in places.most_common(MOST_NAMED)]
        rest = len(places) - len(named)
        return "waiting tasks are " + ", ".join(named) + (f" and {rest} more" if rest else "")


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(self: SimulatedLoop, *args: object, **kwargs: object) -> NoReturn:
        raise RealWorldError(
            f"loop.{name} takes real time, simulated code must not call it; put a simulated "
            "counterpart in the place of what needs it"
        )

    return refuse


for _name in REAL_WORLD:
    setattr(SimulatedLoop, _name, _refuse(_name))


def _place(task: asyncio.Task[Any]) -> str:
    """Task's coroutine, and the innermost of our lines that waits."""
    coroutine: Any = task.get_coro()
    name = coroutine.__qualname__ if hasattr(coroutine, "__qualname__") else repr(coroutine)
    waiting, line = coroutine, ""
    while hasattr(waiting, "cr_frame") and waiting.cr_frame is not None:
        file = Path(waiting.cr_frame.f_code.co_filename)
        if file.parent.name != "asyncio":
            line = f" at {file.name}:{waiting.cr_frame.f_lineno}"
        waiting = waiting.cr_await
    return name + line


def simulate(
    work: Coroutine[Any, Any, ResultT], *, limit_seconds: float = 365 * ONE_DAY
) -> ResultT:
    """Result of `work`, run on a simulated loop of its own.

    Raises:
        SimulationError: it waits for something that never comes.
        RealWorldError: it wants to wait for the real world.
    """
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(limit_seconds)) as runner:
        return runner.run(work)
