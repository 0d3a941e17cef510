"""Engines that serve a model folder as it is: to sample without trainers and without updates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from megatron_dapo.config import RunConfig
from megatron_dapo.config.model_shape import vocabulary_of
from megatron_dapo.rollout.engine_watch import EngineWatch
from megatron_dapo.rollout.event_loop import EventLoopThread
from megatron_dapo.rollout.server_options import Device, ServerOptions, server_options
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.vllm_server import VllmServer

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class LoadedEngines:
    """`rollout.engines` servers of our own, each with the weights of one folder.

    A context: inside it the engines answer, after it nothing of them is left. Each is watched as
    in training; one that is lost is killed, and not replaced: its requests go to the others. Needs
    no process group; `rollout.endpoints` and the trainers' layout are not read.

    Args:
        config: how the engines are started; logs go into its run_dir.
        folder: Hugging Face folder that they load.
        device: that they run on; on CUDA the first `engines` x `engine_tensor` devices.
    """

    def __init__(self, config: RunConfig, folder: Path, device: Device) -> None:
        self.engines: list[VllmEngine] = []
        """Clients in order. Use them inside `run` only."""
        self._rollout = config.rollout
        self._watches: list[asyncio.Task[None]] = []
        self._servers = [VllmServer(options) for options in loading_options(config, folder, device)]
        self._loop = EventLoopThread("evaluated engines")

    def __enter__(self) -> Self:
        """Start the servers and wait for all of them.

        Raises:
            EngineStartError: one of them ended or took too long.
        """
        ready = False
        try:
            for server in self._servers:
                server.start()
            for server in self._servers:
                server.wait_ready()
            self.engines = [self.run(self._connect(server)) for server in self._servers]
            ready = True
        finally:
            if not ready:
                self.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, work: Coroutine[object, object, ResultT]) -> ResultT:
        """Result of `work` on the engines' event loop. Ctrl-C ends the work too."""
        return self._loop.run(work)

    def close(self) -> None:
        """End the servers, whatever state they are in; closing again does nothing."""
        try:
            if self._loop.running:
                self.run(self._disconnect())
        finally:
            self._loop.close()
            for server in self._servers:
                server.stop()

    async def _connect(self, server: VllmServer) -> VllmEngine:
        engine = VllmEngine(
            server.endpoint,
            label=server.label,
            request_timeout_seconds=self._rollout.request_timeout_seconds,
            vocabulary=vocabulary_of(server.options.model),
        )
        await engine.adopt()
        watch = asyncio.ensure_future(self._watch(engine, server))
        watch.add_done_callback(partial(_unwatched, engine))
        self._watches.append(watch)
        return engine

    async def _watch(self, engine: VllmEngine, server: VllmServer) -> None:
        """Once the engine is lost: nothing of its server is left, whatever state that is in."""
        watch = EngineWatch(engine, server, self._rollout)
        await watch.until_gone()
        await watch.last_words()
        reason = server.exit_reason() or "it does not answer, and is killed"
        logger.error("%s: %s. Its last lines:\n%s", server.name, reason, server.log_tail())
        await asyncio.to_thread(server.kill)

    async def _disconnect(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        engines, self.engines = self.engines, []
        for engine in engines:
            await engine.close()


def _unwatched(engine: VllmEngine, watch: asyncio.Task[None]) -> None:
    """What ended the watching early must not leave its requests waiting."""
    error = None if watch.cancelled() else watch.exception()
    if error is not None:
        logger.error("%s is not watched any more", engine.label, exc_info=error)
        engine.lose(f"nothing watches it any more: {error!r}")


def loading_options(config: RunConfig, folder: Path, device: Device) -> list[ServerOptions]:
    """How each engine is started: with devices of its own, which it never gives up."""
    alone = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": folder}),
            "rollout": config.rollout.model_copy(update={"placement": "disaggregated"}),
            "resharding": config.resharding.model_copy(update={"transport": "files"}),
        }
    )
    tensor = config.rollout.engine_tensor
    return [
        server_options(
            alone,
            index,
            device=device,
            visible_devices=()
            if device == "cpu"
            else tuple(range(index * tensor, (index + 1) * tensor)),
        )
        for index in range(config.rollout.engines)
    ]
