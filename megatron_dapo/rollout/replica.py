"""One place among a run's engines: its server, its client, its heartbeat, and its replacement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from megatron_dapo.config import RunConfig
from megatron_dapo.config.model_shape import vocabulary_of
from megatron_dapo.rollout.engine import EngineError
from megatron_dapo.rollout.engine_watch import EngineWatch
from megatron_dapo.rollout.health import SERVER
from megatron_dapo.rollout.remote_engines import token_of
from megatron_dapo.rollout.restarts import RestartBudget
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.vllm_server import EngineStartError, VllmServer
from megatron_dapo.rollout.weight_update import end_open_update

logger = logging.getLogger(__name__)

LATER_SECONDS = 30.0
"""An engine that waits in vain for trainers says so itself before it is given up."""


class Replica:
    """Watches one engine, and puts a fresh one in its place when it is lost.

    Everything but the constructor runs in the engines' event loop.

    Args:
        config: of the run.
        index: of the engine.
        server: ours; None: `rollout.endpoints` names a running one. That is not restarted but
            waited for.
        sleep_mode: as of `VllmEngine`. Its replacement starts only when `make_room` says so.
        replaced: called with each client that takes the last one's place, and when none can.
        started: called after each start of our server.
    """

    def __init__(
        self,
        config: RunConfig,
        index: int,
        server: VllmServer | None,
        *,
        sleep_mode: bool,
        replaced: Callable[[], None],
        started: Callable[[VllmServer], None],
    ) -> None:
        self.index = index
        self.server = server
        self.restarts = 0
        self.failure: EngineError | None = None
        """Why there is no engine in this place any more."""
        self._rollout, self._resharding = config.rollout, config.resharding
        self._vocabulary = vocabulary_of(config.model.path)
        self._sleep_mode = sleep_mode
        self._budget = RestartBudget(config.rollout.max_restarts)
        self._replaced, self._started = replaced, started
        self._room = asyncio.Event()
        self._forgiven = False
        self._retired_lost_requests = 0
        self._watch: asyncio.Task[None] | None = None
        self._engine: VllmEngine | None = None

    @property
    def engine(self) -> VllmEngine:
        """The client of this moment; it may be lost."""
        assert self._engine is not None, "connect first"
        return self._engine

    @property
    def lost_requests(self) -> int:
        """Requests that lost engines of this place had not answered."""
        return self._retired_lost_requests + self.engine.lost_requests

    async def connect(self) -> None:
        """A client of the running server, without weights; from now on it is watched."""
        self._engine = await self._client()
        self._watch = asyncio.ensure_future(self._keep())
        self._watch.add_done_callback(self._unwatched)

    def make_room(self, room: bool) -> None:
        """The trainers leave their device to the engines, or want it back."""
        if room:
            self._room.set()
        else:
            self._room.clear()

    def replace(self, reason: str) -> None:
        """A fresh engine instead of this one, which is not to blame: it costs no restart."""
        self._forgiven = True
        self.engine.lose(reason)

    def step_done(self) -> None:
        """A rollout step is over."""
        if self.engine.usable:
            self._budget.step_done()

    async def close(self, reason: str) -> None:
        """End watching and every request. The server is its owner's to stop."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._engine is not None:
            self._engine.give_up(reason)
            await self._engine.close()

    async def _keep(self) -> None:
        """Watch, replace, watch: until there are no restarts left."""
        while True:
            try:
                self._engine = await self._replace(await self._until_gone())
                self.restarts += 1
            except EngineError as error:
                self.failure = error
                return
            finally:
                self._replaced()

    def _unwatched(self, watch: asyncio.Task[None]) -> None:
        """After whatever else than `EngineError` ended the watching (of a process that cannot be
        started or killed, a file, a connection, an answer): the engine is not used any more, and
        the run ends at its next look at the engines instead of waiting for a replacement."""
        error = None if watch.cancelled() else watch.exception()
        if error is None:
            return
        self.failure = EngineError(
            f"rollout engine {self.index} is lost and cannot be replaced: {error!r}"
        )
        logger.error("%s", self.failure, exc_info=error)
        self.engine.lose("nothing watches it any more")
        self._replaced()

    async def _until_gone(self) -> str:
        """Returns once the engine is lost, all its requests ended: why."""
        engine = self.engine
        seconds = self._resharding.timeout_seconds
        watch = EngineWatch(engine, self.server, self._rollout, seconds)
        await watch.until_gone()
        if not self._forgiven:
            await watch.last_words()
        return engine.why_unusable

    async def _replace(self, reason: str) -> VllmEngine:
        """A fresh client of a fresh server, within the budget.

        Raises:
            EngineError: there are no restarts left; with how it ended, and its last log lines.
        """
        old, charged, self._forgiven = self.engine, not self._forgiven, False
        while True:
            if self.server is not None:
                exit_reason = self.server.exit_reason()
                if exit_reason and exit_reason not in reason:
                    reason = f"{reason} ({exit_reason})"
                tail = self.server.log_tail()
                await asyncio.to_thread(self.server.kill)
            else:
                tail = ""
            wait = self._budget.spend() if charged else 0.0
            if wait is None:
                raise EngineError(self._farewell(reason, tail))
            await self._retire(old)
            logger.warning(
                "%s; restart %d of rollout.max_restarts=%d %s",
                reason,
                self._budget.spent,
                self._budget.allowed,
                f"in {wait:g} s" if self.server is not None else "once it answers again",
            )
            try:
                await asyncio.sleep(wait)
                await self._start()
                fresh = await self._client()
                await fresh.sleep()
                return fresh
            except (EngineStartError, EngineError) as error:
                reason, charged = str(error), True

    async def _start(self) -> None:
        """Until the server of this place answers: ours is started, another one waited for.

        Raises:
            EngineStartError: it ended, or takes longer than `rollout.startup_timeout_seconds`.
        """
        if self._sleep_mode:
            await self._room.wait()
        if self.server is not None:
            self.server.start()
            self._started(self.server)
            await asyncio.to_thread(self.server.wait_ready)
            return
        limit = self._rollout.startup_timeout_seconds
        endpoint = self._rollout.endpoints[self.index]
        engine = self._new_client()
        try:
            async with asyncio.timeout(limit):
                while await engine.http.status(SERVER) != 200:
                    await asyncio.sleep(self._rollout.heartbeat_seconds)
        except TimeoutError as error:
            raise EngineStartError(
                f"rollout engine {self.index} ({endpoint}) did not answer again within {limit} s "
                "(rollout.startup_timeout_seconds). It is not ours to restart; start it again"
            ) from error
        finally:
            await engine.close()

    async def _client(self) -> VllmEngine:
        """A client that has brought no weights in yet.

        Raises:
            EngineError: somebody else's server is in a state that no update can start from.
        """
        engine = self._new_client()
        if self.server is None:
            try:
                await end_open_update(engine.http)
            except EngineError:
                await engine.close()
                raise
        return engine

    def _new_client(self) -> VllmEngine:
        if self.server is None:
            endpoint = self._rollout.endpoints[self.index]
            label = f"rollout engine {self.index} ({endpoint})"
        else:
            endpoint, label = self.server.endpoint, self.server.label
        return VllmEngine(
            endpoint,
            label=label,
            request_timeout_seconds=self._rollout.request_timeout_seconds,
            update_timeout_seconds=self._resharding.timeout_seconds + LATER_SECONDS,
            sleep_mode=self._sleep_mode,
            in_flight=self._resharding.in_flight,
            token=token_of(self._rollout),
            vocabulary=self._vocabulary,
        )

    async def _retire(self, engine: VllmEngine) -> None:
        """Its requests have ended; nothing is sent to it any more."""
        self._retired_lost_requests += engine.lost_requests
        engine.lost_requests = 0
        await engine.close()

    def _farewell(self, reason: str, tail: str) -> str:
        where = ""
        if self.server is not None and tail not in reason:
            where = f" Last lines of {self.server.options.log_file}:\n{tail}"
        return (
            f"rollout engine {self.index} was restarted {self._budget.spent} times "
            f"(rollout.max_restarts) and is lost again: {reason}.{where}"
        )
