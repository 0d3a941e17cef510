"""Requests onto engines: the least loaded one, and another one when it stops answering."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from megatron_dapo.rollout.engine import (
    Engine,
    EngineUnavailable,
    GenerationRequest,
    GenerationResult,
)

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class Dispatcher:
    """Keeps every engine busy without queueing on one what another could start now.

    Args:
        engines: replicas with the same weights.
        max_concurrent: sequences that one engine decodes at once. A few more are handed to it,
            so that a freed place is taken at once.
    """

    def __init__(self, engines: Sequence[Engine], max_concurrent: int) -> None:
        if not engines:
            raise ValueError("no rollout engines: rollout.engines or rollout.endpoints needs one")
        self._engines = engines
        self._load = dict.fromkeys(range(len(engines)), 0)
        self._last_failure: EngineUnavailable | None = None
        self._places = max_concurrent + max_concurrent // 8 + 1
        self._slots = asyncio.Semaphore(len(engines) * self._places)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample on the least loaded engine; an engine that does not answer is not asked again.

        Raises:
            EngineUnavailable: no engine answers any more.
        """
        async with self._slots:
            while self._load:
                chosen = min(self._load, key=self._load.__getitem__)
                self._load[chosen] += 1
                try:
                    return await self._engines[chosen].generate(request)
                except EngineUnavailable as error:
                    self._drop(chosen, error)
                finally:
                    if chosen in self._load:
                        self._load[chosen] -= 1
            raise EngineUnavailable(
                f"all {len(self._engines)} rollout engines are lost, at last: {self._last_failure}"
            ) from self._last_failure

    @property
    def capacity(self) -> int:
        """Requests that the engines which still answer take at once."""
        return len(self._load) * self._places

    async def interrupt(self) -> None:
        """End all requests of this moment with what they have; finish reason "abort"."""

        async def interrupt(engine: int) -> None:
            try:
                await self._engines[engine].interrupt()
            except EngineUnavailable as error:  # its requests end by that, too
                self._drop(engine, error)

        await gather_or_cancel([interrupt(engine) for engine in list(self._load)])

    def _drop(self, engine: int, error: EngineUnavailable) -> None:
        lost = self._load.pop(engine, None)
        if lost is not None:
            self._last_failure = error
            logger.error("engine %d is lost, its %d requests go elsewhere: %s", engine, lost, error)


async def gather_or_cancel(work: Sequence[Coroutine[object, object, ResultT]]) -> list[ResultT]:
    """Results in order; the first failure cancels the rest and waits for it to end."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
