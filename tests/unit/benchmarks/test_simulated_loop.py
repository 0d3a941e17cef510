"""Simulated time: it jumps, repeats itself exactly, and says who waits for what never comes."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from benchmarks.simulated_loop import RealWorldError, SimulationError, simulate


def now() -> float:
    return asyncio.get_running_loop().time()


def test_ten_days_pass_at_once_and_exactly() -> None:
    async def wait() -> float:
        await asyncio.sleep(10 * 86_400)
        return now()

    assert simulate(wait()) == 10 * 86_400


def test_the_clock_stands_still_while_anything_can_run() -> None:
    async def work() -> float:
        task = asyncio.create_task(asyncio.sleep(1.0))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert now() == 0
        await task
        return now()

    assert simulate(work()) == 1.0


def test_timers_fire_in_their_order_whoever_set_them_first() -> None:
    async def work() -> list[float]:
        fired: list[float] = []

        async def one(seconds: float) -> None:
            await asyncio.sleep(seconds)
            assert now() == pytest.approx(seconds)
            fired.append(seconds)

        draw = random.Random(0)
        await asyncio.gather(*(one(draw.uniform(0, 1e5)) for _ in range(500)))
        return fired

    fired = simulate(work())
    assert len(fired) == 500
    assert fired == sorted(fired)


def test_a_run_with_many_tasks_is_repeated_exactly() -> None:
    async def work() -> list[tuple[float, int]]:
        events: list[tuple[float, int]] = []
        slots = asyncio.Semaphore(3)

        async def one(index: int) -> None:
            draw = random.Random(index)
            for _ in range(5):
                async with slots:
                    await asyncio.sleep(draw.choice((1.0, 2.0, 3.0)))
                events.append((now(), index))

        await asyncio.gather(*(one(index) for index in range(40)))
        return events

    assert simulate(work()) == simulate(work())


def test_a_deadlock_names_the_tasks_that_wait_and_where() -> None:
    async def forever(event: asyncio.Event) -> None:
        await event.wait()

    async def work() -> None:
        await asyncio.sleep(5)
        await asyncio.gather(*(forever(asyncio.Event()) for _ in range(7)))

    with pytest.raises(SimulationError, match=r"deadlock at 5.000 s") as caught:
        simulate(work())
    assert "forever at test_simulated_loop.py" in str(caught.value)
    assert "(7x)" in str(caught.value)


def test_a_heartbeat_does_not_hide_that_nothing_goes_on() -> None:
    async def heartbeat() -> None:
        while True:
            await asyncio.sleep(5)

    async def work() -> None:
        beating = asyncio.create_task(heartbeat())
        await asyncio.Event().wait()
        await beating

    with pytest.raises(SimulationError, match=r"not done after 1000 simulated .*heartbeat"):
        simulate(work(), limit_seconds=1000)


def test_time_limits_of_the_code_work_on_simulated_time() -> None:
    async def work() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        return now()

    assert simulate(work()) == 3600


def test_work_for_threads_is_done_at_once_and_its_errors_arrive() -> None:
    async def work() -> float:
        threads = set()
        await asyncio.to_thread(lambda: threads.add(threading.get_ident()))
        assert threads == {threading.get_ident()}
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(None, lambda: 1 // 0)
        return now()

    assert simulate(work()) == 0


def test_connections_and_processes_are_refused() -> None:
    async def connect() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    async def start() -> None:
        await asyncio.create_subprocess_exec("true")

    with pytest.raises(RealWorldError, match="create_connection"):
        simulate(connect())
    with pytest.raises(RealWorldError, match="subprocess_exec"):
        simulate(start())


def test_another_thread_may_not_call_in() -> None:
    async def work() -> list[str]:
        loop = asyncio.get_running_loop()
        seen: list[str] = []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(seen.append, "called")
            except RealWorldError as error:
                seen.append(str(error))

        thread = threading.Thread(target=call, name="stranger")
        thread.start()
        thread.join()
        await asyncio.sleep(1)
        return seen

    (message,) = simulate(work())
    assert "thread stranger calls into a simulated loop" in message
