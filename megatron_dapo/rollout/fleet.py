"""The engines of a run: their servers, their clients, and updates of all of them as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import JsonValue

from megatron_dapo.config import RunConfig
from megatron_dapo.rollout.dispatch import gather_or_cancel
from megatron_dapo.rollout.event_loop import EventLoopThread
from megatron_dapo.rollout.server_options import server_options
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.vllm_server import VllmServer
from megatron_dapo.rollout.weight_update import Digests

logger = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]
ResultT = TypeVar("ResultT")


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
        self.reports: list[list[dict[str, JsonValue]]] = []
        """Of the last update: what each worker of each engine says; [] without digests."""
        self._config = config
        self._sleep_mode = (
            device == "cuda"
            and config.rollout.placement == "colocated"
            and not config.rollout.endpoints
        )
        self._servers = _servers(config, device)
        self._loop = EventLoopThread("rollout engines")
        self._update: tuple[Future[None], int] | None = None
        """The update between its two halves, and the version that it brings."""
        self._shared_directory: Path | None = None

    def __len__(self) -> int:
        return len(self._servers) or len(self._config.rollout.endpoints)

    def run(self, work: Coroutine[object, object, ResultT]) -> ResultT:
        """Result of `work` on the engines' event loop."""
        return self._loop.run(work)

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
            self.engines = self.run(self._connect())

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
        if self._update is not None:
            raise RuntimeError(
                f"the update to version {self._update[1]} is still open; finish_update comes first"
            )
        if len(infos) != len(self.engines):
            raise RuntimeError(
                f"{len(infos)} places to get weights from for {len(self.engines)} engines"
            )
        loading = self._loop.submit(self._load(infos, payload))
        self._update = loading, policy_version

    def finish_update(self, expected: Sequence[Digests] | None) -> int:
        """Second half: wait for the weights, prove them, and only then let any engine go on.

        Args:
            expected: digests by tensor-parallel rank, the same for every engine; None: the
                transport brings none.

        Returns:
            The version that all engines serve now.

        Raises:
            EngineError: an engine failed or holds other weights; no engine is used any more.
        """
        if self._update is None:
            raise RuntimeError("no update is open; start_update comes first")
        loading, policy_version = self._update
        self._update = None
        done = False
        try:
            loading.result()
            self.reports = self.run(self._verify(expected))
            self.run(self._release(policy_version))
            done = True
        finally:
            loading.cancel()
            if not done:
                self.run(self._give_up())
        return policy_version

    def restart(
        self,
        index: int,
        info: Mapping[str, object],
        payload: Mapping[str, object],
        policy_version: int,
        expected: Sequence[Digests] | None = None,
    ) -> None:
        """A fresh engine in place of `index`: current weights first, requests only then.

        Where it runs for `rollout.endpoints`, its owner starts it, and this connects again.
        The transport must still hold `payload`. Seeds stay those of the replica's number.

        Raises:
            EngineStartError: it does not come up.
            EngineError: the update failed; the engine is not used.
        """
        if self._update is not None:
            raise RuntimeError(f"restart of engine {index} inside an update; finish that first")
        old = self.engines[index]
        self.run(self._retire(old))
        if self._servers:
            server = self._servers[index]
            server.stop()
            server.start()
            if self._shared_directory is not None:
                server.remove_when_orphaned(self._shared_directory)
            server.wait_ready()
        self.engines[index] = self.run(self._renew(index, info, payload, policy_version, expected))
        logger.warning("engine %d was restarted and serves version %d", index, policy_version)

    def close(self) -> None:
        """Release connections and end our servers, whatever state they are in."""
        try:
            if self._update is not None:
                self._update[0].cancel()
            self.run(self._disconnect())
        finally:
            self._loop.close()
            for server in self._servers:
                server.stop()

    def _client(self, index: int) -> VllmEngine:
        rollout = self._config.rollout
        server = self._servers[index] if self._servers else None
        endpoint = rollout.endpoints[index] if server is None else server.endpoint
        return VllmEngine(
            endpoint,
            label=f"rollout engine {index} ({endpoint})" if server is None else server.label,
            request_timeout_seconds=rollout.request_timeout_seconds,
            sleep_mode=self._sleep_mode,
            in_flight=self._config.resharding.in_flight,
        )

    async def _connect(self) -> list[VllmEngine]:
        return [self._client(index) for index in range(len(self))]

    async def _disconnect(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def _sleep(self) -> None:
        await asyncio.gather(*(engine.sleep() for engine in self.engines))

    async def _load(
        self, infos: Sequence[Mapping[str, object]], payload: Mapping[str, object]
    ) -> None:
        async def load(engine: VllmEngine, info: Mapping[str, object]) -> None:
            await engine.wake_up("weights")
            await engine.load(info, payload)

        pairs = zip(self.engines, infos, strict=True)
        await gather_or_cancel([load(engine, info) for engine, info in pairs])

    async def _verify(self, expected: Sequence[Digests] | None) -> list[list[dict[str, JsonValue]]]:
        return await gather_or_cancel([engine.verify(expected) for engine in self.engines])

    async def _release(self, policy_version: int) -> None:
        async def release(engine: VllmEngine) -> None:
            await engine.release(policy_version)
            await engine.wake_up("kv_cache")

        await gather_or_cancel([release(engine) for engine in self.engines])

    async def _give_up(self) -> None:
        for engine in self.engines:
            engine.give_up("a weight update of the engines failed")

    async def _retire(self, engine: VllmEngine) -> None:
        engine.give_up("it is being restarted")
        await engine.close()

    async def _renew(
        self,
        index: int,
        info: Mapping[str, object],
        payload: Mapping[str, object],
        policy_version: int,
        expected: Sequence[Digests] | None,
    ) -> VllmEngine:
        engine = self._client(index)
        done = False
        try:
            reports = await engine.update(info, payload, policy_version, expected)
            done = True
        finally:
            if not done:
                await engine.close()
        if self.reports:
            self.reports[index] = reports
        return engine


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
    """CUDA devices of one engine: among the trainers' own, or after them."""
    if device == "cpu":
        return ()
    colocated = config.rollout.placement == "colocated"
    first = index * config.rollout.engine_tensor
    first += 0 if colocated else config.parallel.world_size
    return tuple(range(first, first + config.rollout.engine_tensor))
