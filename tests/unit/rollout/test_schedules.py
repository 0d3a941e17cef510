"""What holds for every schedule, on simulated engines: accounts, bounds, determinism, resume."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated_loop import simulate
from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.keep_rate import missing_prompts
from megatron_dapo.rollout.sampler import RolloutStep
from tests.unit.rollout.fake_engine import FakeEngine, Source
from tests.unit.rollout.scheduling import Rollouts
from tests.unit.rollout.simulated import (
    ALL,
    ASYNC_1,
    ASYNC_3,
    ASYNC_FINISH,
    CONTINUE,
    CONTINUE_2,
    DROP,
    FINISH,
    ONE_STEP_OFF,
    REPEATABLE,
    STEPS,
    Run,
    Sections,
    World,
    whole_run,
)

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
        ended += int(m["generated"])
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


@pytest.mark.parametrize("sections", [CONTINUE, CONTINUE_2, ASYNC_1, ASYNC_3], ids=str)
def test_what_would_only_be_thrown_away_is_not_begun(sections: Sections) -> None:
    """Neither more groups than steps can train on before they are too old, nor any for steps
    behind the last one."""
    worlds = [World(target=40, slots=100, group_size=4, keep_rate=0.5, seed=n) for n in range(4)]
    stale, left = 0.0, 0.0
    for world in worlds:
        run = whole_run(world, sections)
        stale += sum(step.metrics["filter/discarded_stale"] for step in run.steps)
        carried = [step.metrics["filter/carried_out"] for step in run.steps]
        assert max(carried) >= 15
        left += carried[-1] + run.left
    trained = len(worlds) * STEPS * 40
    assert stale <= 0.03 * trained
    assert left <= 0.03 * trained


def test_the_last_step_of_a_run_asks_for_nothing_that_only_another_one_would_take() -> None:
    """Nor does it wait for what runs behind its groups."""
    carry = SamplingConfig(**FINISH[1])  # type: ignore[arg-type]
    rollout = RolloutConfig(prompts_per_step=40, group_size=4)

    async def run(last_step: int) -> tuple[list[RolloutStep], int, float]:
        """Two steps, what the second one asks for first, and how long it takes."""
        source = Source((0, 50))
        engine = FakeEngine(seconds=lambda asked: 1.0 + asked.prompt_token_ids[2] % 7)
        rollouts = Rollouts([engine], source, rollout, carry, last_step=last_step)
        steps = [await rollouts.scheduler.collect(1, 0)]
        engine.version = 1
        waves, began = len(source.asked), asyncio.get_running_loop().time()
        steps.append(await rollouts.scheduler.collect(2, 1))
        await rollouts.scheduler.close()
        return steps, source.asked[waves], asyncio.get_running_loop().time() - began

    last, asked, seconds = simulate(run(2))
    other, asked_before_another, seconds_before_another = simulate(run(3))
    need = 40 - last[1].metrics["filter/carried_in"]
    assert asked == missing_prompts(int(need), 0, 0, last[0].metrics["filter/keep_rate"])
    assert asked_before_another > asked
    assert seconds < seconds_before_another
    assert [step.groups for step in last] == [step.groups for step in other]
    carried = [step.metrics["filter/carried_out"] for step in (*last, *other)]
    assert carried[1] == 0 and min(carried[0], carried[3]) > 0


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
