"""The engines of a run: their servers, their clients, and updates of all of them as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import JsonValue

from megatron_dapo.config import RunConfig
from megatron_dapo.rollout.dispatch import gather_or_cancel
from megatron_dapo.rollout.event_loop import EventLoopThread
from megatron_dapo.rollout.remote_engines import token_of, wait_for_endpoints
from megatron_dapo.rollout.server_options import server_options
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.vllm_server import VllmServer
from megatron_dapo.rollout.weight_update import Digests

logger = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]
ResultT = TypeVar("ResultT")
LATER_SECONDS = 30.0
"""An engine that waits in vain for trainers says so itself before it is given up."""


@dataclass(frozen=True)
class _OpenUpdate:
    """An update between its two halves."""

    policy_version: int
    engines: Sequence[int]
    loading: Future[None]


class EngineFleet:
    """All engines of a run, ours or running ones (`rollout.endpoints`).

    Requests and updates run in an event loop of their own thread, so an update goes on while
    the caller sends the weights. Servers start and stop in the caller's thread: it owns them.

    Args:
        config: of the run.
        device: that engines of ours run on.
    """

    def __init__(self, config: RunConfig, device: Device) -> None:
        self.engines: list[VllmEngine] = []
        """Clients in order, from `wait_ready` on. Use them inside `run` only."""
        self.reports: Mapping[int, list[dict[str, JsonValue]]] = {}
        """Of the last update, by engine: what each of its workers says; [] without digests."""
        self._config = config
        self._sleep_mode = (
            device == "cuda"
            and config.rollout.placement == "colocated"
            and not config.rollout.endpoints
        )
        self._servers = _servers(config, device)
        self._loop = EventLoopThread("rollout engines")
        self._update: _OpenUpdate | None = None
        self._unproven: Sequence[VllmEngine] = ()
        self._shared_directory: Path | None = None

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
        """
        if not self.engines:
            for server in self._servers:
                server.wait_ready()
            wait_for_endpoints(self._config.rollout)
            self.engines = [self.run(self._connect(index)) for index in range(len(self))]

    def sleep(self) -> None:
        """Every engine gives up the device, where it shares it with a trainer."""
        self.run(self._sleep())

    def remove_when_orphaned(self, directory: Path) -> None:
        """Have our servers' guardians remove `directory` should this process be killed."""
        self._shared_directory = directory
        for server in self._servers:
            server.remove_when_orphaned(directory)

    def start_update(
        self,
        infos: Sequence[Mapping[str, object]],
        payload: Mapping[str, object],
        policy_version: int,
    ) -> None:
        """First half of an update of every engine: they pause and start to take weights.

        Returns at once; the weights may have to be sent for it to go on.

        Args:
            infos: where each engine gets weights from, in order of the engines.
            payload: description of this update, the same for all.
            policy_version: that the engines will serve.
        """
        self._check_no_update()
        if len(infos) != len(self.engines):
            raise RuntimeError(
                f"{len(infos)} places to get weights from for {len(self.engines)} engines"
            )
        self._start(dict(enumerate(infos)), payload, policy_version)

    def restart(
        self,
        index: int,
        info: Mapping[str, object],
        payload: Mapping[str, object],
        policy_version: int,
    ) -> None:
        """A fresh engine in place of `index`, and the first half of its update.

        It answers no request before `let_requests_in`, after its weights are proven. Engines of
        `rollout.endpoints` are started by their owner; this connects to them again. The number of
        a replica decides on its seed, so that stays distinct.

        Raises:
            EngineStartError: it does not come up.
        """
        self._check_no_update()
        self.run(self._retire(self.engines[index], "it is being restarted"))
        if self._servers:
            server = self._servers[index]
            server.stop()
            server.start()
            if self._shared_directory is not None:
                server.remove_when_orphaned(self._shared_directory)
            server.wait_ready()
        self.engines[index] = self.run(self._connect(index))
        logger.warning("%s is fresh, it gets version %d", self.engines[index].label, policy_version)
        self._start({index: info}, payload, policy_version)

    def deliver(self, payload: Mapping[str, object]) -> None:
        """Between the halves: every engine of the update takes what `payload` describes.

        For transports that know it only while they send; blocks until all have taken it.

        Raises:
            EngineError: an engine failed.
        """
        if self._update is None:
            raise RuntimeError("no update is open; start_update comes first")
        self._update.loading.result()
        engines = [self.engines[index] for index in self._update.engines]
        self.run(self._deliver(engines, payload))

    def update_failure(self) -> BaseException | None:
        """What an engine of the open update has failed with so far. From any thread."""
        update = self._update
        if update is None or not update.loading.done() or update.loading.cancelled():
            return None
        return update.loading.exception()

    def finish_update(self, expected: Sequence[Digests] | None) -> dict[int, VllmEngine]:
        """Second half: wait for the weights, prove them, and only then let any engine go on.

        The engines answer probes now, and requests from `let_requests_in` on.

        Args:
            expected: digests by tensor-parallel rank, the same for every engine; None: the
                transport brings none.

        Returns:
            The engines that were updated, by number.

        Raises:
            EngineError: an engine failed or holds other weights. None of those that were to be
                updated is used any more.
        """
        if self._update is None:
            raise RuntimeError("no update is open; start_update comes first")
        update, self._update = self._update, None
        engines = [self.engines[index] for index in update.engines]
        done = False
        try:
            update.loading.result()
            reports = self.run(self._verify(engines, expected))
            self.run(self._release(engines, update.policy_version))
            done = True
        finally:
            update.loading.cancel()
            if not done:
                self.run(self._give_up(engines))
        self._unproven = engines
        self.reports = dict(zip(update.engines, reports, strict=True))
        return dict(zip(update.engines, engines, strict=True))

    def let_requests_in(self) -> None:
        """The engines of the update that was finished last answer requests from now on."""
        self.run(self._let_requests_in())

    def close(self) -> None:
        """Release connections and end our servers, whatever state they are in.

        Closing again does nothing.
        """
        try:
            if self._loop.running:
                self.run(self._disconnect())
        finally:
            self._loop.close()
            for server in self._servers:
                server.stop()

    async def _connect(self, index: int) -> VllmEngine:
        """A client that has brought no weights in yet."""
        rollout, resharding = self._config.rollout, self._config.resharding
        server = self._servers[index] if self._servers else None
        endpoint = rollout.endpoints[index] if server is None else server.endpoint
        return VllmEngine(
            endpoint,
            label=f"rollout engine {index} ({endpoint})" if server is None else server.label,
            request_timeout_seconds=rollout.request_timeout_seconds,
            update_timeout_seconds=resharding.timeout_seconds + LATER_SECONDS,
            sleep_mode=self._sleep_mode,
            in_flight=resharding.in_flight,
            token=token_of(rollout),
        )

    async def _retire(self, engine: VllmEngine, reason: str) -> None:
        engine.give_up(reason)
        await engine.close()

    async def _disconnect(self) -> None:
        if self._update is not None:
            self._update.loading.cancel()
        await asyncio.gather(*(self._retire(engine, "the run ends") for engine in self.engines))

    async def _sleep(self) -> None:
        await asyncio.gather(*(engine.sleep() for engine in self.engines))

    def _check_no_update(self) -> None:
        if self._update is not None:
            raise RuntimeError(
                f"the update to version {self._update.policy_version} is still open; "
                "finish_update comes first"
            )

    def _start(
        self, infos: Mapping[int, Mapping[str, object]], payload: Mapping[str, object], version: int
    ) -> None:
        loading = self._loop.submit(self._load(infos, payload))
        self._update = _OpenUpdate(version, tuple(infos), loading)

    async def _load(
        self, infos: Mapping[int, Mapping[str, object]], payload: Mapping[str, object]
    ) -> None:
        async def load(engine: VllmEngine, info: Mapping[str, object]) -> None:
            await engine.wake_up("weights")
            await engine.load(info, payload)

        await gather_or_cancel([load(self.engines[index], info) for index, info in infos.items()])

    async def _deliver(self, engines: Sequence[VllmEngine], payload: Mapping[str, object]) -> None:
        await gather_or_cancel([engine.deliver(payload) for engine in engines])

    async def _verify(
        self, engines: Sequence[VllmEngine], expected: Sequence[Digests] | None
    ) -> list[list[dict[str, JsonValue]]]:
        return await gather_or_cancel([engine.verify(expected) for engine in engines])

    async def _release(self, engines: Sequence[VllmEngine], policy_version: int) -> None:
        await gather_or_cancel([engine.release(policy_version) for engine in engines])

    async def _let_requests_in(self) -> None:
        for engine in self._unproven:
            engine.let_requests_in()
        self._unproven = ()

    async def _give_up(self, engines: Sequence[VllmEngine]) -> None:
        for engine in engines:
            engine.give_up("a weight update of the engines failed")


def _servers(config: RunConfig, device: Device) -> list[VllmServer]:
    """Our own engines, not started; none where the configuration names running ones."""
    if config.rollout.endpoints:
        return []
    return [
        VllmServer(
            server_options(
                config, index, device=device, visible_devices=_devices(config, device, index)
            )
        )
        for index in range(config.rollout.engines)
    ]


def _devices(config: RunConfig, device: Device, index: int) -> tuple[int, ...]:
    """CUDA devices that one engine sees; it works on the first `engine_tensor` of them.

    Among the trainers' own it sees all those of this machine, since it may map what any trainer
    here has packed (cuda_ipc). Otherwise it sees its own only, which come after the trainers'.
    """
    if device == "cpu":
        return ()
    tensor, trainers = config.rollout.engine_tensor, config.parallel.world_size
    first = index * tensor
    if config.rollout.placement == "disaggregated":
        return tuple(range(trainers + first, trainers + first + tensor))
    here = trainers // config.parallel.nodes
    return (*range(first, here), *range(first))
