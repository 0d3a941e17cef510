"""Requests onto engines that are slow, lost, replaced, or all gone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from benchmarks.simulated_loop import simulate
from megatron_dapo.rollout.dispatch import Dispatcher
from megatron_dapo.rollout.engine import EngineUnavailable, GenerationRequest, GenerationResult
from tests.unit.rollout.scripted_server import REQUEST


@dataclass(eq=False)
class Engine:
    """Takes its time for each request; once lost, all that it runs ends in EngineUnavailable."""

    seconds: float = 1.0
    answered: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    lost: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def lose(self) -> None:
        self.lost = True
        self.gone.set()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if self.lost:
            raise EngineUnavailable("lost before")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async with asyncio.timeout(self.seconds):
                await self.gone.wait()
            raise EngineUnavailable("lost")
        except TimeoutError:
            self.answered.append(request.request_id)
            return GenerationResult((1,), (-1.0,), "stop", ((0, 1),), 1)
        finally:
            self.running -= 1

    async def interrupt(self) -> None:
        pass

    async def close(self) -> None:
        pass


def requests(count: int) -> list[GenerationRequest]:
    return [replace(REQUEST, request_id=f"r{index}") for index in range(count)]


async def all_of(dispatcher: Dispatcher, count: int) -> list[asyncio.Task[GenerationResult]]:
    tasks = [asyncio.ensure_future(dispatcher.generate(r)) for r in requests(count)]
    await asyncio.sleep(0)
    return tasks


def test_a_slow_engine_gets_fewer_requests() -> None:
    async def body() -> tuple[int, int]:
        slow, fast = Engine(seconds=10.0), Engine(seconds=1.0)
        await asyncio.gather(*await all_of(Dispatcher([slow, fast], 2), 60))
        assert max(slow.most_running, fast.most_running) <= 3
        return len(slow.answered), len(fast.answered)

    slow, fast = simulate(body())
    assert slow + fast == 60
    assert fast >= 5 * slow > 0


def test_requests_of_a_lost_engine_are_answered_once_by_others_and_first() -> None:
    async def body() -> tuple[list[str], list[str]]:
        dying, other = Engine(), Engine()
        dispatcher = Dispatcher([dying, other], 2)
        tasks = await all_of(dispatcher, 20)
        await asyncio.sleep(1.5)
        before = list(dying.answered)
        dying.lose()
        await asyncio.gather(*tasks)
        assert dispatcher.capacity == 3
        return before, other.answered

    before, rest = simulate(body())
    assert len(before) == 3
    assert sorted(before + rest) == sorted(f"r{index}" for index in range(20))
    lost = {"r6", "r7", "r8", "r9", "r10", "r11"} - set(rest[:6])
    assert set(rest[6:9]) >= lost  # what had been sent before comes before what had not


def test_a_replacement_in_the_list_is_used() -> None:
    async def body() -> tuple[Engine, Engine]:
        engines = [Engine(), Engine()]
        first = engines[0]
        dispatcher = Dispatcher(engines, 2)
        first.lose()
        await asyncio.gather(*await all_of(dispatcher, 4))
        assert dispatcher.capacity == 3
        engines[0] = Engine()
        assert dispatcher.capacity == 6
        await asyncio.gather(*await all_of(dispatcher, 6))
        return first, engines[0]

    lost, fresh = simulate(body())
    assert lost.answered == []
    assert len(fresh.answered) == 3


def test_without_an_engine_all_that_waits_is_told() -> None:
    async def body() -> list[object]:
        engines = [Engine(), Engine()]
        dispatcher = Dispatcher(engines, 2)
        tasks = await all_of(dispatcher, 20)
        await asyncio.sleep(0.5)
        for engine in engines:
            engine.lose()
        results: list[object] = list(await asyncio.gather(*tasks, return_exceptions=True))
        assert dispatcher.capacity == 0
        engines[1] = Engine()
        assert (await dispatcher.generate(REQUEST)).policy_version == 1
        return results

    results = simulate(body())
    assert len(results) == 20
    for result in results:
        assert isinstance(result, EngineUnavailable)
        assert "all 2 rollout engines are lost, at last: lost" in str(result)


def test_a_request_that_is_cancelled_while_it_waits_frees_its_turn() -> None:
    async def body() -> Engine:
        engine = Engine()
        dispatcher = Dispatcher([engine], 1)
        tasks = await all_of(dispatcher, 6)
        await asyncio.sleep(0.5)
        for task in tasks[1:4]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return engine

    engine = simulate(body())
    assert sorted(engine.answered) == ["r0", "r4", "r5"]
    assert engine.most_running == 2


def test_a_dispatcher_needs_an_engine() -> None:
    with pytest.raises(ValueError, match=r"rollout\.engines or rollout\.endpoints"):
        Dispatcher([], 4)
