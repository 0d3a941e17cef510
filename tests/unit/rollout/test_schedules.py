"""What holds for every schedule, on simulated engines: accounts, bounds, determinism, resume."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@dataclass
class Run:
    """Steps of one scheduler, trained on one after the other."""

    world: World
    sections: Sections
    state: dict[str, object] | None = None
    steps: list[RolloutStep] = field(default_factory=list)
    left: int = 0
    """Prompts whose responses are unfinished at the end."""

    def __post_init__(self) -> None:
        world = self.world
        rollout, sampling = self.sections
        law = SpeedLaw()
        slow = replace(law, step_seconds=law.step_seconds * world.slow_factor)
        self.engines = [
            SimulatedEngine(
                number,
                world.slots,
                speed=slow if number == world.engines - 1 else law,
                lengths=LENGTHS,
                keep_in_flight=world.keep_in_flight,
            )
            for number in range(world.engines)
        ]
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
            graded,
            self.rollout,
            SamplingConfig(
                max_rounds=world.max_rounds,
                prompts_per_round=world.first_wave,
                **sampling,  # type: ignore[arg-type]
            ),
            interrupt=self.dispatcher.interrupt,
            seed=world.seed,
            stop_token_ids=[2],
            capacity=lambda: self.dispatcher.capacity,
            last_step=STEPS,
        )
        if self.state is not None:
            self.order.taken = int(str(self.state["taken"]))
            self.scheduler.load_state_dict(self.state["sampling"])  # type: ignore[arg-type]

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


async def graded(prompt: Prompt, response: Response) -> tuple[Response, Reward]:
    """At once."""
    return response, grade(prompt, response)


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


worlds = st.builds(
    World,
    target=st.integers(1, 5),
    group_size=st.integers(2, 4),
    keep_rate=st.sampled_from([0.3, 0.6, 0.9]),
    engines=st.integers(1, 3),
    slots=st.integers(1, 12),
    slow_factor=st.sampled_from([1.0, 3.0]),
    train_seconds=st.sampled_from([0.0, 20.0, 200.0]),
    keep_in_flight=st.booleans(),
    first_wave=st.one_of(st.none(), st.integers(1, 12)),
    seed=st.integers(0, 1000),
)


def without_clocks(metrics: Mapping[str, float]) -> dict[str, float]:
    """Also without what was thrown away, which is whatever had been finished by then."""
    timed = ("rollout/tokens", "filter/discarded", "filter/put_back")
    return {name: value for name, value in metrics.items() if not name.startswith(timed)}


@pytest.mark.parametrize("sections", ALL, ids=str)
@settings(deadline=None, max_examples=12)
@given(world=worlds)
def test_every_step_has_its_groups_and_every_prompt_one_end(
    sections: Sections, world: World
) -> None:
    run = whole_run(replace(world, max_rounds=500), sections)
    assert [len(step.groups) for step in run.steps] == [world.target] * STEPS
    assert all(group.mixed for step in run.steps for group in step.groups)
    seeds = Counter(response.seed for response in run.responses)
    assert max(seeds.values()) == 1
    ended = run.left
    for step in run.steps:
        m = {name.removeprefix("filter/"): v for name, v in step.metrics.items()}
        assert m["generated"] + m["carried_in"] == (
            m["kept"]
            + m["drop_all_right"]
            + m["drop_all_wrong"]
            + m["drop_ungraded"]
            + m["carried_out"]
            + m["discarded_stale"]
        )
        assert m["discarded_unfinished"] == 0
        ended += m["generated"]
    carried = [0.0, *(step.metrics["filter/carried_out"] for step in run.steps)]
    assert [step.metrics["filter/carried_in"] for step in run.steps] == carried[:-1]
    if run.rollout.mode != "async":  # whose engines go on after the last step
        assert run.order.taken == ended


@pytest.mark.parametrize("sections", ALL, ids=str)
@settings(deadline=None, max_examples=12)
@given(world=worlds)
def test_nothing_older_than_allowed_is_trained_on(sections: Sections, world: World) -> None:
    run = whole_run(replace(world, max_rounds=500), sections)
    allowed = 0 if sections is DROP else run.rollout.max_staleness
    for version, step in enumerate(run.steps):
        ages = [version - v for g in step.groups for r in g.responses for _, v in r.version_spans]
        assert max(ages) <= allowed
        oldest = [
            version - min(v for _, v in r.version_spans) for g in step.groups for r in g.responses
        ]
        assert step.metrics["rollout/staleness/max"] == max(max(oldest), 0)
        assert step.metrics["rollout/staleness/mean"] == pytest.approx(
            sum(max(age, 0) for age in oldest) / len(oldest)
        )
    if sections is ONE_STEP_OFF:
        versions = [
            {r.version_spans for g in step.groups for r in g.responses} for step in run.steps
        ]
        assert versions == [{((0, max(step - 1, 0)),)} for step in range(STEPS)]


@pytest.mark.parametrize("sections", REPEATABLE, ids=str)
@settings(deadline=None, max_examples=12)
@given(
    world=worlds,
    engines=st.integers(1, 3),
    slots=st.integers(1, 12),
    train_seconds=st.sampled_from([0.0, 50.0]),
)
def test_engines_and_their_speed_change_no_group(
    sections: Sections, world: World, engines: int, slots: int, train_seconds: float
) -> None:
    other = replace(
        world, engines=engines, slots=slots, slow_factor=2.0, train_seconds=train_seconds
    )
    here, there = whole_run(world, sections), whole_run(other, sections)
    for first, second in zip(here.steps, there.steps, strict=True):
        assert first.groups == second.groups
        assert first.generated == second.generated
        assert without_clocks(first.metrics) == without_clocks(second.metrics)
    assert here.order.taken == there.order.taken


@pytest.mark.parametrize("sections", REPEATABLE, ids=str)
@settings(deadline=None, max_examples=12)
@given(world=worlds, stop=st.integers(1, STEPS - 1))
def test_a_resumed_run_is_the_uninterrupted_one(
    sections: Sections, world: World, stop: int
) -> None:
    async def in_two() -> list[RolloutStep]:
        first = await Run(world, sections).train(last=stop)
        state = await first.saved()
        await first.scheduler.close()
        second = Run(world, sections, state)
        assert await second.saved() == state
        await second.train(first=stop + 1)
        return first.steps + second.steps

    straight, resumed = whole_run(world, sections).steps, simulate(in_two())
    assert [step.groups for step in resumed] == [step.groups for step in straight]
    for first, second in zip(straight, resumed, strict=True):
        assert without_clocks(first.metrics) == without_clocks(second.metrics)


@pytest.mark.parametrize(
    "sections", [CONTINUE, CONTINUE_2, ASYNC_1, ASYNC_3, ASYNC_FINISH], ids=str
)
@settings(deadline=None, max_examples=12)
@given(world=worlds, stop=st.integers(1, STEPS - 1))
def test_a_checkpoint_between_keeps_every_token_and_doubles_none(
    sections: Sections, world: World, stop: int
) -> None:
    async def in_two() -> tuple[Run, Run, dict[str, object]]:
        first = await Run(world, sections).train(last=stop)
        state = await first.saved()
        await first.scheduler.close()
        second = Run(world, sections, state)
        assert await second.saved() == state
        await second.train(first=stop + 1)
        await second.scheduler.close()
        return first, second, state

    first, second, state = simulate(in_two())
    seeds = Counter(response.seed for response in first.responses + second.responses)
    assert max(seeds.values()) == 1
    sampling = state["sampling"]
    waiting = len(sampling["ready"]) + len(sampling["unfinished"])  # type: ignore[index]
    carried_in = second.steps[0].metrics["filter/carried_in"]
    assert carried_in == len(sampling["ready"])  # type: ignore[index]
    if sections[1]["unfinished"] == "finish":
        assert sampling["unfinished"] == []  # type: ignore[index]
    assert waiting >= carried_in
    assert [len(step.groups) for step in second.steps] == [world.target] * (STEPS - stop)


def test_continued_responses_are_what_they_would_have_been() -> None:
    world = World(target=4, slots=8, keep_rate=0.9)
    run = whole_run(world, CONTINUE)
    assert sum(step.metrics["filter/continued"] for step in run.steps) > 0
    pieces = [r for r in run.responses if len(r.version_spans) > 1]
    assert pieces
    for response in run.responses:  # its first token says how long it becomes, the last is the end
        assert len(response.token_ids) == min(response.token_ids[0], 60)
        assert len(response.rollout_logprobs) == len(response.token_ids)
        starts = [start for start, _ in response.version_spans]
        assert starts[0] == 0 and starts == sorted(set(starts))
