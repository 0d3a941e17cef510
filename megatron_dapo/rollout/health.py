"""Does an engine still live? Asked again and again, of its server and of what computes behind it.

Slow is not dead: an engine that answers at all within the time-out is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Ask = Callable[[str], Awaitable[int | None]]
"""Status of the answer to GET of a path; None: the connection failed."""
SERVER, CORE = "/health", "/is_paused"
"""Answered by the server's own loop; by the process that steps the model, between two steps."""
BROKEN = 500
"""Statuses from here on: the server says of itself that it cannot go on."""
DEATH_SECONDS = 2.0
"""After an answer that something broke: in this time a server that is ending stops answering."""
DEATH_LOOKS = 8


@dataclass(frozen=True)
class Heartbeat:
    """Asks one engine as long as it lives. Time comes from the running loop alone.

    Args:
        ask: of one engine.
        every_seconds: between an answer and the next question.
        timeout_seconds: longest silence.
        updating: weights are being brought in; the core then answers nothing else.
        update_seconds: that the core may be silent for beyond the timeout while they are.
    """

    ask: Ask
    every_seconds: float
    timeout_seconds: float
    updating: Callable[[], bool] = lambda: False
    update_seconds: float = 0.0

    async def until_lost(self) -> str:
        """Returns once the engine is lost: how it was noticed."""
        watches = [
            asyncio.ensure_future(self._until_silent(SERVER, lambda: False)),
            asyncio.ensure_future(self._until_silent(CORE, self.updating)),
        ]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()

    async def _until_silent(self, path: str, excused: Callable[[], bool]) -> str:
        now = asyncio.get_running_loop().time
        heard = idle_since = now()
        while True:
            beat = asyncio.ensure_future(self.ask(path))
            try:
                while not beat.done():
                    await asyncio.wait([beat], timeout=self.every_seconds)
                    if excused():
                        idle_since = now()
                    if beat.done():
                        break
                    silence = now() - (heard if excused() else max(heard, idle_since))
                    if silence > self.timeout_seconds + excused() * self.update_seconds:
                        return self._silent(path, silence)
            finally:
                beat.cancel()
            status = beat.result()
            if status is not None and status >= BROKEN:
                return f"it answers {status} to GET {path}"
            if status is not None:
                heard = now()
            elif now() - heard > self.timeout_seconds:
                return self._silent(path, now() - heard)
            await asyncio.sleep(self.every_seconds)

    def _silent(self, path: str, seconds: float) -> str:
        return (
            f"no answer to GET {path} for {seconds:.0f} s "
            f"(rollout.heartbeat_timeout_seconds={self.timeout_seconds:g})"
        )


async def falls_silent(ask: Ask) -> bool:
    """After an answer that something broke: the server is ending, not only that call failed."""
    for _ in range(DEATH_LOOKS):
        status = await ask(SERVER)
        if status is None or status >= BROKEN:
            return True
        await asyncio.sleep(DEATH_SECONDS / DEATH_LOOKS)
    return False
