"""An event loop in a thread of its own, so that requests go on while the trainer does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


class Interrupted(Exception):
    """`EventLoopThread.interrupt` ended the work before its result."""


class EventLoopThread:
    """Runs coroutines until `close`. Any thread may hand them in."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._ready = threading.Event()
        self._interrupted = threading.Event()
        self._cancel: Callable[[], bool] | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def running(self) -> bool:
        """False once it was closed."""
        return self._thread.is_alive()

    def submit(self, work: Coroutine[object, object, ResultT]) -> Future[ResultT]:
        """Start `work` and return at once. Cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[object, object, ResultT]) -> ResultT:
        """Result of `work`. Ctrl-C and every other end of the waiting end the work too."""
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def run_interruptible(self, work: Coroutine[object, object, ResultT]) -> ResultT:
        """As `run`, one at a time.

        Raises:
            Interrupted: `interrupt` was called, before or meanwhile.
        """
        future = self.submit(work)
        self._cancel = future.cancel
        try:
            if self._interrupted.is_set():
                future.cancel()
            return future.result()
        except CancelledError:
            if self._interrupted.is_set():
                raise Interrupted from None
            raise
        finally:
            self._cancel = None
            future.cancel()

    def interrupt(self) -> None:
        """End what `run_interruptible` runs, now and later. From any thread."""
        self._interrupted.set()
        cancel = self._cancel
        if cancel is not None:
            cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread; closing again does nothing."""
        if self.running:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _serve(self) -> None:
        asyncio.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()
