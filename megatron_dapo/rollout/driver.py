"""The rollouts of a run on global rank 0: engines, prompts and graders behind plain calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, cast

from pydantic import JsonValue

from megatron_dapo.config import RunConfig
from megatron_dapo.data.prompts import PromptStream
from megatron_dapo.reward.grade import grade_response, grading_errors
from megatron_dapo.rollout.inputs import RolloutInputs
from megatron_dapo.rollout.sampler import (
    Grade,
    RolloutStep,
    SamplingPlan,
    collect_groups,
    generate_all,
)
from megatron_dapo.rollout.server_options import server_options
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.vllm_server import VllmServer
from megatron_dapo.types import Group

logger = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]
ResultT = TypeVar("ResultT")


class RolloutDriver:
    """Owns engines and the order of prompts. Every method blocks; use it from one thread.

    Args:
        config: of the run.
        device: that engines of ours run on.

    Raises:
        ConfigError: prompts, tokenizer or reward plug-in cannot be used.
    """

    def __init__(self, config: RunConfig, *, device: Device) -> None:
        self._config = config
        self._sleep_mode = (
            device == "cuda"
            and config.rollout.placement == "colocated"
            and not config.rollout.endpoints
        )
        self._servers = _servers(config, device)
        self._engines: list[VllmEngine] = []
        self._loop = asyncio.Runner()
        inputs = RolloutInputs.read(config)
        self._decode = inputs.tokenizer.decode
        self._stop_ids = inputs.stop_token_ids
        self._prompts = PromptStream(inputs.train, config.seed)
        self._heldout = inputs.heldout
        self._grade: Grade = partial(
            grade_response,
            config=config.reward,
            max_response_tokens=config.rollout.max_response_tokens,
            plugin=inputs.plugin,
        )
        logger.info("generation stops at token ids %s", list(self._stop_ids))

    def start(self) -> None:
        """Start our engines. Returns at once, except where they must first give up the device."""
        for server in self._servers:
            server.start()
        if self._sleep_mode:
            self.wait_ready()
            self._run(self._sleep())

    def wait_ready(self) -> None:
        """Block until every engine answers.

        Raises:
            EngineStartError: one of them ended or took too long.
        """
        if not self._engines:
            for server in self._servers:
                server.wait_ready()
            self._run(self._connect())

    def collect(self, step: int, policy_version: int) -> RolloutStep:
        """The groups that `step` trains on, sampled from weights `policy_version`."""
        rollout = self._run(
            collect_groups(
                self._engines,
                self._prompts.take,
                self._grade,
                self._decode,
                self._config.rollout,
                self._config.sampling,
                seed=self._config.seed,
                step=step,
                policy_version=policy_version,
                stop_token_ids=self._stop_ids,
            )
        )
        rollout.metrics["reward/errors"] = float(grading_errors(rollout.generated))
        rollout.metrics["data/epoch"] = float(self._prompts.epoch)
        self._run(self._sleep())
        return rollout

    def sample_heldout(self, step: int, policy_version: int) -> list[Group]:
        """`evaluation.samples_per_prompt` graded responses of each held-out prompt."""
        evaluation = self._config.evaluation
        plan = SamplingPlan(
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            max_tokens=self._config.rollout.max_response_tokens,
            stop_token_ids=self._stop_ids,
            group_size=1 if evaluation.temperature == 0 else evaluation.samples_per_prompt,
            seed=self._config.seed,
            step=step,
            policy_version=policy_version,
            purpose="evaluate",
        )
        answers = self._run(
            generate_all(
                self._engines,
                self._heldout,
                self._decode,
                plan,
                max_concurrent=self._config.rollout.max_concurrent_sequences,
            )
        )
        return [
            Group(
                prompt=prompt,
                responses=responses,
                rewards=tuple(self._grade(prompt, response) for response in responses),
            )
            for prompt, responses in zip(self._heldout, answers, strict=True)
        ]

    def update_weights(self, payload: Mapping[str, object], policy_version: int) -> None:
        """Every engine loads the published weights; none generates in between.

        Raises:
            EngineError: an engine failed; the run has to stop.
        """
        for server in self._servers:
            server.remove_when_orphaned(Path(str(payload["path"])).parent)
        self._run(self._update_weights(payload, policy_version))

    def state_dict(self) -> dict[str, JsonValue]:
        """Position in the prompt order, as JSON."""
        return {"prompts": cast(JsonValue, self._prompts.state_dict())}

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        """Go on at a saved position."""
        self._prompts.load_state_dict(cast(dict[str, int | str], state["prompts"]))

    def close(self) -> None:
        """Release connections and end our servers, whatever state they are in."""
        try:
            self._run(self._disconnect())
            self._loop.close()
        finally:
            for server in self._servers:
                server.stop()

    def _run(self, work: Coroutine[object, object, ResultT]) -> ResultT:
        return self._loop.run(work)

    async def _connect(self) -> None:
        labels = {server.endpoint: server.label for server in self._servers}
        self._engines = [
            VllmEngine(
                endpoint,
                label=labels.get(endpoint, endpoint),
                request_timeout_seconds=self._config.rollout.request_timeout_seconds,
                sleep_mode=self._sleep_mode,
            )
            for endpoint in self._config.rollout.endpoints or labels
        ]

    async def _disconnect(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))

    async def _sleep(self) -> None:
        await asyncio.gather(*(engine.sleep() for engine in self._engines))

    async def _update_weights(self, payload: Mapping[str, object], policy_version: int) -> None:
        async def update(engine: VllmEngine) -> None:
            await engine.wake_up("weights")
            await engine.update_weights(payload, policy_version)
            await engine.wake_up("kv_cache")

        await asyncio.gather(*(update(engine) for engine in self._engines))


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
