"""Schedulers over engines without a model, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.dispatch import Dispatcher
from megatron_dapo.rollout.draft_source import PromptSource
from megatron_dapo.rollout.engine import GenerationRequest, GenerationResult
from megatron_dapo.rollout.grading import Grade, ThreadedGrader
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.rollout.scheduler import GroupScheduler
from megatron_dapo.types import Prompt, Response, Reward
from tests.unit.rollout.fake_engine import STOP, FakeEngine, decode, grade

Sampled = Callable[[Prompt, Response], object]


@dataclass
class Rollouts:
    """A scheduler and what it works with."""

    engines: Sequence[FakeEngine]
    prompts: PromptSource
    rollout: RolloutConfig
    sampling: SamplingConfig
    grade: Grade | None = None
    """None: at once, inside the event loop."""
    threads: int = 1
    seed: int = 0
    last_step: int | None = None
    max_error_share: float = 1.0
    scheduler: GroupScheduler = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.engines, self.rollout.max_concurrent_sequences)
        self.scheduler = GroupScheduler(
            self.generate,
            self.prompts,
            at_once if self.grade is None else ThreadedGrader(self.grade, decode, self.threads),
            self.rollout,
            self.sampling,
            interrupt=self.interrupt,
            seed=self.seed,
            stop_token_ids=[STOP],
            capacity=lambda: len(self.engines) * self.rollout.max_concurrent_sequences,
            last_step=self.last_step,
            max_error_share=self.max_error_share,
        )

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await self.dispatcher.generate(request)

    async def interrupt(self) -> None:
        await asyncio.gather(*(engine.interrupt() for engine in self.engines))


async def at_once(prompt: Prompt, response: Response) -> tuple[Response, Reward]:
    """A grader without threads, for simulated time."""
    await asyncio.sleep(0)
    if response.finish_reason == "abort":
        return response, Reward(None, 0.0)
    return response, grade(prompt, response)


def collect_step(rollouts: Rollouts, step: int = 1, policy_version: int = 0) -> RolloutStep:
    """One step in an event loop of its own."""

    async def run() -> RolloutStep:
        try:
            return await rollouts.scheduler.collect(step, policy_version)
        finally:
            await rollouts.scheduler.close()

    return asyncio.run(run())
