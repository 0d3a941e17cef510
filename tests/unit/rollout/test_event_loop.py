"""Work on the engines' loop that a stop ends early, and work that it leaves alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from megatron_dapo.rollout.event_loop import EventLoopThread, Interrupted


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    running = EventLoopThread("test")
    yield running
    running.close()


async def slow(ended: threading.Event, begun: threading.Event | None = None) -> str:
    try:
        if begun is not None:
            begun.set()
        await asyncio.sleep(600)
    finally:
        ended.set()
    return "done"


async def quick() -> str:
    return "done"


def test_an_interrupt_ends_the_work_and_what_it_waits_for(loop: EventLoopThread) -> None:
    begun, ended = threading.Event(), threading.Event()

    def interrupt() -> None:
        begun.wait()
        loop.interrupt()

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted):
        loop.run_interruptible(slow(ended, begun))
    assert ended.wait(60)


def test_work_that_comes_after_an_interrupt_is_not_begun(loop: EventLoopThread) -> None:
    loop.interrupt()
    with pytest.raises(Interrupted):
        loop.run_interruptible(slow(threading.Event()))


def test_other_work_goes_on_after_an_interrupt(loop: EventLoopThread) -> None:
    assert loop.run_interruptible(quick()) == "done"
    loop.interrupt()
    assert loop.run(quick()) == "done"


def test_work_that_is_cancelled_by_others_is_not_called_interrupted(loop: EventLoopThread) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(BaseException) as raised:
        loop.run_interruptible(cancelled())
    assert not isinstance(raised.value, Interrupted)
