"""How the loss of an engine is noticed: its process ends, it falls silent, or a request says it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass

from megatron_dapo.config.schema import RolloutConfig
from megatron_dapo.rollout.health import Heartbeat
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.vllm_server import VllmServer

EXIT_LOOK_SECONDS = 0.1
"""Between two looks whether our own server has ended."""
LAST_WORDS_SECONDS = 2.0
"""What a server that broke gets to end, so that its exit code can be told."""


@dataclass(frozen=True)
class EngineWatch:
    """Watches one engine in the engines' event loop.

    Args:
        engine: its client.
        server: ours; None: somebody else's.
        rollout: the section; its heartbeat keys.
        update_seconds: that the engine may be silent for, beyond the heartbeat, while weights are
            brought in.
    """

    engine: VllmEngine
    server: VllmServer | None
    rollout: RolloutConfig
    update_seconds: float = 0.0

    async def until_gone(self) -> None:
        """Returns once the engine is lost, all its requests ended."""
        signs: list[Coroutine[object, object, str]] = [self._until_ended(), self._until_silent()]
        watches = [asyncio.ensure_future(sign) for sign in signs]
        gone = asyncio.ensure_future(self.engine.gone.wait())
        try:
            await asyncio.wait([*watches, gone], return_when=asyncio.FIRST_COMPLETED)
            for watch in watches:
                if watch.done():
                    self.engine.lose(watch.result())
        finally:
            for task in [*watches, gone]:
                task.cancel()

    async def last_words(self) -> None:
        """A broken connection is noticed before the end of the process behind it: wait for that."""
        if self.server is not None:
            ended = self._until_ended()
            try:
                async with asyncio.timeout(LAST_WORDS_SECONDS):
                    await ended
            except TimeoutError:
                return

    async def _until_ended(self) -> str:
        """Our server has ended; with what."""
        server = self.server
        if server is None:
            await asyncio.Event().wait()  # somebody else's
            raise AssertionError("nobody sets it")
        while not (reason := server.exit_reason()):
            await asyncio.sleep(EXIT_LOOK_SECONDS)
        return reason

    async def _until_silent(self) -> str:
        heartbeat = Heartbeat(
            self.engine.http.status,
            every_seconds=self.rollout.heartbeat_seconds,
            timeout_seconds=self.rollout.heartbeat_timeout_seconds,
            updating=lambda: self.engine.updating,
            update_seconds=self.update_seconds,
        )
        return await heartbeat.until_lost()
