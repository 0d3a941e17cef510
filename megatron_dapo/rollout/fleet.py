"""The engines of a run: their servers, their replacements, and updates of several as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue

from megatron_dapo.config import RunConfig
from megatron_dapo.rollout.dispatch import gather_or_cancel
from megatron_dapo.rollout.engine import EngineUnavailable
from megatron_dapo.rollout.event_loop import EventLoopThread
from megatron_dapo.rollout.own_servers import own_servers
from megatron_dapo.rollout.remote_engines import wait_for_endpoints
from megatron_dapo.rollout.replica import Replica
from megatron_dapo.rollout.server_options import Device
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.vllm_server import VllmServer
from megatron_dapo.rollout.weight_update import Digests

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class _OpenUpdate:
    """An update between its two halves."""

    policy_version: int
    engines: Mapping[int, VllmEngine]
    """Those that are being updated; one that is lost meanwhile stays here."""
    loading: Mapping[int, Future[None]]


class EngineFleet:
    """All engines of a run, ours or running ones (`rollout.endpoints`).

    Requests and updates run in an event loop of their own thread, so an update goes on while
    the caller sends the weights. Each engine is watched there; a lost one is killed and a fresh
    one started in its place, which gets weights by an update before it serves.

    Args:
        config: of the run.
        device: that engines of ours run on.
    """

    def __init__(self, config: RunConfig, device: Device) -> None:
        self.engines: list[VllmEngine] = []
        """Clients in order, from `wait_ready` on. Use them inside `run` only; one that is lost
        stays until the fresh one in its place serves."""
        self.reports: Mapping[int, list[dict[str, JsonValue]]] = {}
        """Of the last update, by engine: what each of its workers says; [] without digests."""
        self._config = config
        self._sleep_mode = (
            device == "cuda"
            and config.rollout.placement == "colocated"
            and not config.rollout.endpoints
        )
        self._servers = own_servers(config, device)
        self._loop = EventLoopThread("rollout engines")
        self._replicas: list[Replica] = []
        self._changed: asyncio.Event
        self._update: _OpenUpdate | None = None
        self._unproven: Mapping[int, VllmEngine] = {}
        self._shared_directory: Path | None = None
        self._taken: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._servers) or len(self._config.rollout.endpoints)

    def run(self, work: Coroutine[object, object, ResultT]) -> ResultT:
        """Result of `work` on the engines' event loop."""
        return self._loop.run(work)

    def run_interruptible(self, work: Coroutine[object, object, ResultT]) -> ResultT:
        """As `run`; raises `Interrupted` once `interrupt` was called."""
        return self._loop.run_interruptible(work)

    def interrupt(self) -> None:
        """End `run_interruptible`, now and later. From any thread."""
        self._loop.interrupt()

    def start(self) -> None:
        """Start our engines. Returns at once, except where they must first give up the device."""
        for server in self._servers:
            server.start()
        if self._sleep_mode:
            self.wait_ready()
            self.sleep()

    def wait_ready(self) -> None:
        """Block until every engine answers.

        Raises:
            EngineStartError: one of them ended or took too long.
            EngineError: a running one cannot be used as it is.
        """
        if not self.engines:
            for server in self._servers:
                server.wait_ready()
            wait_for_endpoints(self._config.rollout)
            self.run(self._connect())

    def sleep(self) -> None:
        """Every engine gives up the device, where it shares it with a trainer."""
        self.run(self._sleep())

    def remove_when_orphaned(self, directory: Path) -> None:
        """Have our servers' guardians remove `directory` should this process be killed."""
        self._shared_directory = directory
        for server in self._servers:
            server.remove_when_orphaned(directory)

    def to_update(self, *, all_engines: bool) -> dict[int, bool]:
        """Engines that need weights now, and which of them are fresh since their restart.

        Blocks until there is one, unless another one serves: a replacement that still starts is
        then left for the next time.

        Args:
            all_engines: those that serve need weights, too: there is a new version.

        Raises:
            EngineError: an engine was lost more often than `rollout.max_restarts`.
            Interrupted: `interrupt` was called.
        """
        return self.run_interruptible(self._to_update(all_engines))

    def start_update(
        self,
        infos: Mapping[int, Mapping[str, object]],
        payload: Mapping[str, object],
        policy_version: int,
    ) -> None:
        """First half of an update of these engines: they pause and start to take weights.

        Returns at once; the weights may have to be sent for it to go on.

        Args:
            infos: by engine: where it gets weights from.
            payload: description of this update, the same for all.
            policy_version: that the engines will serve.
        """
        if self._update is not None:
            raise RuntimeError(
                f"the update to version {self._update.policy_version} is still open; "
                "finish_update comes first"
            )
        engines = {index: self._replicas[index].engine for index in infos}
        loading = {
            index: self._loop.submit(_load(engine, infos[index], payload))
            for index, engine in engines.items()
        }
        self._update = _OpenUpdate(policy_version, engines, loading)

    def deliver(self, payload: Mapping[str, object]) -> None:
        """Between the halves: every engine of the update takes what `payload` describes.

        For transports that know it only while they send; blocks until all have taken it.

        Raises:
            EngineError: an engine failed.
        """
        update = self._opened()
        for loading in update.loading.values():
            loading.result()
        self.run(_deliver(update.engines.values(), payload))

    def update_failure(self) -> BaseException | None:
        """What an engine of the open update has failed with so far. From any thread."""
        for loading in [] if self._update is None else self._update.loading.values():
            if loading.done() and not loading.cancelled() and loading.exception() is not None:
                return loading.exception()
        return None

    def finish_update(self, expected: Sequence[Digests] | None) -> dict[int, VllmEngine]:
        """Second half: wait for the weights, prove them, and only then let any engine go on.

        The engines answer probes now, and requests from `let_requests_in` on. One that is lost on
        the way is left out; it is replaced, and its replacement needs an update of its own.

        Args:
            expected: digests by tensor-parallel rank, the same for every engine; None: the
                transport brings none.

        Returns:
            The engines that were updated, by number.

        Raises:
            EngineError: an engine refused or holds other weights. None of those that were to be
                updated is used any more.
        """
        update = self._opened()
        done = False
        try:
            proven = self.run(self._prove(update, expected))
            done = True
        finally:
            self._close_update("a weight update of the engines failed" if not done else "")
        self._unproven = proven
        return proven

    def abandon_update(self) -> list[int]:
        """Instead of the second half, when the weights could not be sent.

        The engines that were to take them hold perhaps half. Returns those among them that are
        lost: because of them the sending failed, and the others are replaced, too. [] when none
        is: then none of them is used any more.
        """
        return self.run(self._abandon(self._opened()))

    def let_requests_in(self) -> None:
        """The engines of the update that was finished last answer requests from now on."""
        self.run(self._let_requests_in())

    def step_done(self) -> None:
        """A rollout step is over: engines that live through many may be restarted as often as
        fresh ones."""
        self.run(self._each_replica(Replica.step_done))

    def take_counts(self) -> dict[str, float]:
        """Metrics of the engines' health: of this moment, and since they were last taken."""
        totals = {
            "engine/restarts": float(sum(replica.restarts for replica in self._replicas)),
            "engine/lost_requests": float(sum(each.lost_requests for each in self._replicas)),
        }
        before, self._taken = self._taken, totals
        live = float(sum(engine.usable for engine in self.engines))
        changes = {name: total - before.get(name, 0.0) for name, total in totals.items()}
        return {"engine/live": live, **changes}

    def close(self) -> None:
        """Release connections and end our servers, whatever state they are in.

        Closing again does nothing.
        """
        try:
            if self._loop.running:
                self.run(self._disconnect())
        finally:
            for server in self._servers:
                server.stop()
            self._loop.close()

    def _opened(self) -> _OpenUpdate:
        if self._update is None:
            raise RuntimeError("no update is open; start_update comes first")
        return self._update

    def _close_update(self, failure: str) -> None:
        update, self._update = self._opened(), None
        for loading in update.loading.values():
            loading.cancel()
        if failure:
            self.run(_give_up(update.engines.values(), failure))

    async def _connect(self) -> None:
        self._changed = asyncio.Event()
        self._replicas = [
            Replica(
                self._config,
                index,
                self._servers[index] if self._servers else None,
                sleep_mode=self._sleep_mode,
                replaced=self._changed.set,
                started=self._restarted,
            )
            for index in range(len(self))
        ]
        await gather_or_cancel([replica.connect() for replica in self._replicas])
        self.engines = [replica.engine for replica in self._replicas]

    def _restarted(self, server: VllmServer) -> None:
        if self._shared_directory is not None:
            server.remove_when_orphaned(self._shared_directory)

    async def _to_update(self, all_engines: bool) -> dict[int, bool]:
        await self._each_replica(lambda replica: replica.make_room(True))
        try:
            while True:
                for replica in self._replicas:
                    if replica.failure is not None:
                        raise replica.failure
                usable = {
                    replica.index: replica.restarts > 0 and not replica.engine.has_weights
                    for replica in self._replicas
                    if replica.engine.usable
                }
                # One that shares the trainers' device must be up before they train on.
                pending = self._sleep_mode and len(usable) < len(self._replicas)
                if usable and not pending:
                    return {i: fresh for i, fresh in usable.items() if fresh or all_engines}
                self._changed.clear()
                await self._changed.wait()
        finally:
            await self._each_replica(lambda replica: replica.make_room(False))

    async def _prove(
        self, update: _OpenUpdate, expected: Sequence[Digests] | None
    ) -> dict[int, VllmEngine]:
        loaded = await of_the_living(
            update.engines, lambda index, _: asyncio.wrap_future(update.loading[index])
        )
        reports = await of_the_living(
            {index: update.engines[index] for index in loaded},
            lambda _, engine: engine.verify(expected),
        )
        released = await of_the_living(
            {index: update.engines[index] for index in reports},
            lambda _, engine: engine.release(update.policy_version),
        )
        self.reports = {index: reports[index] for index in released}
        return {index: update.engines[index] for index in released}

    async def _abandon(self, update: _OpenUpdate) -> list[int]:
        await asyncio.gather(
            *map(asyncio.wrap_future, update.loading.values()), return_exceptions=True
        )
        self._update = None
        lost = [index for index, engine in update.engines.items() if engine.lost]
        reason = "the weights that it was to take were not all sent"
        for index in update.engines.keys() - set(lost):
            if lost:
                self._replicas[index].replace(reason)
            else:
                update.engines[index].give_up(reason)
        return lost

    async def _let_requests_in(self) -> None:
        for index, engine in self._unproven.items():
            if engine.usable:
                engine.let_requests_in()
                self.engines[index] = engine
        self._unproven = {}

    async def _sleep(self) -> None:
        await of_the_living(
            {index: engine for index, engine in enumerate(self.engines) if engine.usable},
            lambda _, engine: engine.sleep(),
        )

    async def _each_replica(self, act: Callable[[Replica], None]) -> None:
        for replica in self._replicas:
            act(replica)

    async def _disconnect(self) -> None:
        for loading in [] if self._update is None else self._update.loading.values():
            loading.cancel()
        await asyncio.gather(*(replica.close("the run ends") for replica in self._replicas))


async def of_the_living(
    engines: Mapping[int, VllmEngine],
    act: Callable[[int, VllmEngine], Awaitable[ResultT]],
) -> dict[int, ResultT]:
    """Results of those that are not lost over it, by number, once all are through.

    Raises:
        EngineError: one refused.
    """

    async def one(index: int, engine: VllmEngine) -> ResultT:
        return await act(index, engine)

    results = await asyncio.gather(
        *(one(index, engine) for index, engine in engines.items()), return_exceptions=True
    )
    kept: dict[int, ResultT] = {}
    for index, result in zip(engines, results, strict=True):
        if isinstance(result, EngineUnavailable):
            logger.warning("left out of the weight update: %s", result)
        elif isinstance(result, BaseException):
            raise result
        else:
            kept[index] = result
    return kept


async def _load(
    engine: VllmEngine, info: Mapping[str, object], payload: Mapping[str, object]
) -> None:
    await engine.wake_up("weights")
    await engine.load(info, payload)


async def _deliver(engines: Iterable[VllmEngine], payload: Mapping[str, object]) -> None:
    await gather_or_cancel([engine.deliver(payload) for engine in engines])


async def _give_up(engines: Iterable[VllmEngine], reason: str) -> None:
    for engine in engines:
        engine.give_up(reason)
