"""Requests onto engines: the least loaded one, and another one when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_dapo.rollout.engine import (
    Engine,
    EngineUnavailable,
    GenerationRequest,
    GenerationResult,
)

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class _Place:
    """One engine, as long as it lasts."""

    number: int
    engine: Engine
    load: int = 0
    lost: EngineUnavailable | None = None


class Dispatcher:
    """Keeps every engine busy without queueing on one what another could start now.

    A slow engine frees its places late and so gets fewer requests. Those of a lost one go
    elsewhere under their old request_id, before those that have not been sent yet.

    Args:
        engines: replicas with the same weights. A lost one may be replaced in this very list; the
            new one is then used.
        max_concurrent: sequences that one engine decodes at once. A few more are handed to it,
            so that a freed place is taken at once.
    """

    def __init__(self, engines: Sequence[Engine], max_concurrent: int) -> None:
        if not engines:
            raise ValueError("no rollout engines: rollout.engines or rollout.endpoints needs one")
        self._engines = engines
        self._most = max_concurrent + max_concurrent // 8 + 1
        self._places: list[_Place] = []
        self._waiting: deque[asyncio.Future[_Place]] = deque()

    @property
    def capacity(self) -> int:
        """Requests that the engines which still answer take at once."""
        return len(self._live()) * self._most

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample on the least loaded engine; an engine that does not answer is not asked again.

        Raises:
            EngineUnavailable: no engine is left.
        """
        sent_before = False
        while True:
            place = await self._take(first=sent_before)
            try:
                return await place.engine.generate(request)
            except EngineUnavailable as error:
                self._drop(place, error)
                sent_before = True
            finally:
                place.load -= 1
                self._hand_out()

    async def interrupt(self) -> None:
        """End all requests of this moment with what they have; finish reason "abort"."""

        async def interrupt(place: _Place) -> None:
            try:
                await place.engine.interrupt()
            except EngineUnavailable as error:  # its requests end by that, too
                self._drop(place, error)

        await gather_or_cancel([interrupt(place) for place in self._live()])

    async def _take(self, *, first: bool) -> _Place:
        """A place on the least loaded engine, once one is free; in the order of asking."""
        mine: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        if first:
            self._waiting.appendleft(mine)
        else:
            self._waiting.append(mine)
        self._hand_out()
        try:
            return await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled() and mine.exception() is None:
                mine.result().load -= 1
                self._hand_out()
            raise

    def _hand_out(self) -> None:
        """Free places to those who wait; without an engine, the bad news."""
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
                continue
            live = self._live()
            if not live:
                self._waiting.popleft().set_exception(self._none_left())
                continue
            least = min(live, key=lambda place: place.load)
            if least.load >= self._most:
                return
            least.load += 1
            self._waiting.popleft().set_result(least)

    def _live(self) -> list[_Place]:
        known = dict(enumerate(self._places))
        self._places = [
            known[number]
            if number in known and known[number].engine is engine
            else _Place(number, engine)
            for number, engine in enumerate(self._engines)
        ]
        return [place for place in self._places if place.lost is None]

    def _drop(self, place: _Place, error: EngineUnavailable) -> None:
        if place.lost is None:
            place.lost = error
            logger.error(
                "engine %d is lost, its %d requests go elsewhere: %s",
                place.number,
                place.load,
                error,
            )

    def _none_left(self) -> EngineUnavailable:
        last = self._places[-1].lost
        lost = EngineUnavailable(
            f"all {len(self._engines)} rollout engines are lost, at last: {last}"
        )
        lost.__cause__ = last
        return lost


async def gather_or_cancel(work: Sequence[Coroutine[object, object, ResultT]]) -> list[ResultT]:
    """Results in order; the first failure cancels the rest and waits for it to end."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
