"""Runs of a scheduler on simulated engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.simulated_engines import (
    LengthLaw,
    SimulatedEngine,
    SpeedLaw,
    grade,
    simulated_prompts,
)
from benchmarks.simulated_loop import simulate
from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.dispatch import Dispatcher
from megatron_dapo.rollout.grading import Grader
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.rollout.scheduler import GroupScheduler
from megatron_dapo.types import Prompt, Response, Reward

Sections = tuple[Mapping[str, object], Mapping[str, object]]
DROP: Sections = ({}, {})
FINISH: Sections = ({}, {"surplus": "carry", "unfinished": "finish"})
CONTINUE: Sections = ({}, {"surplus": "carry", "unfinished": "continue"})
CONTINUE_2: Sections = ({"max_staleness": 2}, CONTINUE[1])
ONE_STEP_OFF: Sections = ({"mode": "one_step_off"}, {})
ASYNC_1: Sections = ({"mode": "async"}, CONTINUE[1])
ASYNC_3: Sections = ({"mode": "async", "max_staleness": 3}, CONTINUE[1])
ASYNC_FINISH: Sections = ({"mode": "async", "max_staleness": 2}, FINISH[1])
ALL = (DROP, FINISH, CONTINUE, CONTINUE_2, ONE_STEP_OFF, ASYNC_1, ASYNC_3, ASYNC_FINISH)
REPEATABLE = (DROP, FINISH, ONE_STEP_OFF)
"""Schedules whose groups depend on seeds and prompts alone."""
STEPS = 5
LENGTHS = LengthLaw(median_tokens=600.0)


@dataclass(frozen=True)
class World:
    """Everything that a run is made of but its schedule."""

    target: int = 3
    group_size: int = 3
    keep_rate: float = 0.6
    engines: int = 2
    slots: int = 4
    slow_factor: float = 1.0
    """Of the last engine."""
    train_seconds: float = 20.0
    keep_in_flight: bool = False
    first_wave: int | None = None
    max_rounds: int = 60
    max_seconds: float | None = None
    when_short: str = "stop"
    max_error_share: float = 1.0
    seed: int = 0


@dataclass
class Order:
    """Prompts without an end, and how many of them were taken."""

    prompts: Sequence[Prompt]
    taken: int = 0

    def take(self, count: int) -> list[Prompt]:
        first, self.taken = self.taken, self.taken + count
        return [self.prompts[i % len(self.prompts)] for i in range(first, self.taken)]

    def put_back(self, count: int) -> None:
        assert 0 <= count <= self.taken
        self.taken -= count


async def graded(prompt: Prompt, response: Response) -> tuple[Response, Reward]:
    """At once."""
    return response, grade(prompt, response)


@dataclass
class Run:
    """Steps of one scheduler, trained on one after the other."""

    world: World
    sections: Sections
    state: dict[str, object] | None = None
    grader: Grader = graded
    steps: list[RolloutStep] = field(default_factory=list)
    left: int = 0
    """Prompts whose responses are unfinished at the end."""

    def __post_init__(self) -> None:
        world = self.world
        rollout, sampling = self.sections
        self.engines: list[SimulatedEngine] = []
        self.replace_engines()
        self.order = Order(
            simulated_prompts(40, world.keep_rate, world.group_size, LENGTHS, world.seed)
        )
        self.dispatcher = Dispatcher(self.engines, world.slots)
        self.rollout = RolloutConfig(
            prompts_per_step=world.target,
            group_size=world.group_size,
            max_response_tokens=60,
            **rollout,  # type: ignore[arg-type]
        )
        self.scheduler = GroupScheduler(
            self.dispatcher.generate,
            self.order,
            self.grader,
            self.rollout,
            SamplingConfig(
                max_rounds=world.max_rounds,
                prompts_per_round=world.first_wave,
                max_seconds=world.max_seconds,
                when_short=world.when_short,  # type: ignore[arg-type]
                **sampling,  # type: ignore[arg-type]
            ),
            interrupt=self.dispatcher.interrupt,
            seed=world.seed,
            stop_token_ids=[2],
            capacity=lambda: self.dispatcher.capacity,
            last_step=STEPS,
            max_error_share=world.max_error_share,
        )
        if self.state is not None:
            self.order.taken = int(str(self.state["taken"]))
            self.scheduler.load_state_dict(self.state["sampling"])  # type: ignore[arg-type]

    def replace_engines(self) -> None:
        """Fresh ones that serve version 0, for the same dispatcher."""
        world, law = self.world, SpeedLaw()
        slow = replace(law, step_seconds=law.step_seconds * world.slow_factor)
        self.engines[:] = [
            SimulatedEngine(
                number,
                world.slots,
                speed=slow if number == world.engines - 1 else law,
                lengths=LENGTHS,
                keep_in_flight=world.keep_in_flight,
            )
            for number in range(world.engines)
        ]

    async def train(self, first: int = 1, last: int = STEPS) -> Run:
        """Steps `first` to `last`; step n is trained by version n - 1 and makes version n."""
        await self.update(first - 1)
        for step in range(first, last + 1):
            self.steps.append(await self.scheduler.collect(step, step - 1))
            await asyncio.sleep(self.world.train_seconds)
            if self.rollout.mode == "one_step_off":
                await self.scheduler.drain()
            await self.update(step)
        return self

    async def update(self, version: int) -> None:
        await asyncio.gather(*(engine.update(version, 2.0) for engine in self.engines))

    async def saved(self) -> dict[str, object]:
        """A checkpoint, as it comes back from its file."""
        await self.scheduler.settle()
        state = {"taken": self.order.taken, "sampling": self.scheduler.state_dict()}
        self.scheduler.go_on()
        return json.loads(json.dumps(state))

    @property
    def responses(self) -> list[Response]:
        return [r for step in self.steps for group in step.groups for r in group.responses]


def whole_run(world: World, sections: Sections) -> Run:
    async def run() -> Run:
        done = Run(world, sections)
        try:
            return await done.train()
        finally:
            await done.scheduler.settle()
            done.left = len(done.scheduler.state_dict()["unfinished"])  # type: ignore[arg-type]
            await done.scheduler.close()

    return simulate(run())
