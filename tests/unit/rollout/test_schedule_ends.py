"""How steps end that do not simply fill: bounds, lost engines, failing graders, stops."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulated_loop import simulate
from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.grading import TooManyGradingErrors, check_grading_errors
from megatron_dapo.rollout.group_state import DraftStateError
from megatron_dapo.rollout.member_sampler import EnginesLost
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.rollout.scheduler_state import (
    goes_on_with_unfinished,
    state_to_json,
    usable_state,
)
from megatron_dapo.rollout.selection import NotEnoughGroups
from megatron_dapo.rollout.streaming import Streaming
from megatron_dapo.types import Group, Prompt, Response, Reward
from tests.unit.rollout.fake_engine import FakeEngine, Source
from tests.unit.rollout.scheduling import Rollouts
from tests.unit.rollout.simulated import (
    ALL,
    ASYNC_1,
    ASYNC_3,
    ASYNC_FINISH,
    CONTINUE,
    DROP,
    FINISH,
    ONE_STEP_OFF,
    Run,
    Sections,
    World,
    graded,
    whole_run,
)

HOPELESS = World(keep_rate=0.05, group_size=2, target=4, max_rounds=2, slots=8)


async def always_wrong(prompt: Prompt, response: Response) -> tuple[Response, Reward]:
    return response, Reward(0.0, -1.0)


@pytest.mark.parametrize("sections", ALL, ids=str)
def test_prompts_that_never_mix_end_the_step_at_the_bound(sections: Sections) -> None:
    async def run() -> tuple[Run, NotEnoughGroups]:
        run = Run(HOPELESS, sections, grader=always_wrong)
        with pytest.raises(NotEnoughGroups) as caught:
            await run.train()
        return run, caught.value

    done, error = simulate(run())
    bound = HOPELESS.max_rounds * HOPELESS.target
    assert done.order.taken == bound
    assert (error.counts.all_wrong, error.counts.kept) == (bound, 0)
    assert f"Groups by number of right responses: 0: {bound}." in str(error)
    assert "too hard" in str(error)
    assert all(engine.running == 0 for engine in done.engines)


@pytest.mark.parametrize("sections", ALL, ids=str)
def test_a_step_may_train_on_what_there_is_and_says_so(
    sections: Sections, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(target=8, max_rounds=1, when_short="train", slots=8)
    with caplog.at_level(logging.WARNING):
        run = whole_run(world, sections)
    short = [step for step in run.steps if len(step.groups) < world.target]
    assert short and all(group.mixed for step in run.steps for group in step.groups)
    told = [r.message for r in caplog.records if "trains on what there is" in r.message]
    assert len(told) == len(short)
    assert re.search(r"only [1-7] of 8 groups .*Groups by number of right responses: 0: ", told[0])


@pytest.mark.parametrize("sections", [DROP, FINISH, CONTINUE, ASYNC_3], ids=str)
def test_a_step_waits_no_longer_than_allowed(sections: Sections) -> None:
    world = World(target=8, slots=1, engines=1, max_seconds=60.0)

    async def run() -> tuple[float, str]:
        run = Run(world, sections)
        started = asyncio.get_running_loop().time()
        with pytest.raises(NotEnoughGroups) as caught:
            await run.scheduler.collect(1, 0)
        return asyncio.get_running_loop().time() - started, str(caught.value)

    seconds, message = simulate(run())
    assert 60 <= seconds < 62
    assert "after 60 seconds (sampling.max_seconds)" in message


@pytest.mark.parametrize("sections", [DROP, FINISH, CONTINUE, ASYNC_3], ids=str)
def test_what_is_there_when_time_is_over_may_train(sections: Sections) -> None:
    world = World(target=8, slots=3, keep_rate=0.9, max_seconds=80.0, when_short="train")
    run = whole_run(world, sections)
    assert all(0 < len(step.groups) <= 8 for step in run.steps)
    assert any(len(step.groups) < 8 for step in run.steps)
    seeds = Counter(response.seed for response in run.responses)
    assert max(seeds.values()) == 1
    ended = run.left + sum(
        int(step.metrics["filter/generated"] + step.metrics["filter/discarded_unfinished"])
        for step in run.steps
    )
    if run.rollout.mode != "async":
        assert run.order.taken == ended


def test_prompts_of_groups_that_are_too_many_when_time_is_over_come_again() -> None:
    """The first prompt hangs, and more groups than the step takes end behind it."""
    source = Source((50,))
    engine = FakeEngine(seconds=lambda asked: 1.0 if asked.prompt_token_ids[2] else 1000.0)
    rollout = RolloutConfig(prompts_per_step=4, group_size=8)
    sampling = SamplingConfig(prompts_per_round=12, max_seconds=10.0)
    rollouts = Rollouts([engine], source, rollout, sampling)

    async def run() -> list[RolloutStep]:
        steps = [await rollouts.scheduler.collect(step, 0) for step in (1, 2)]
        await rollouts.scheduler.close()
        return steps

    first, second = simulate(run())
    assert [group.prompt.id for group in first.groups] == ["p1", "p2", "p3", "p4"]
    lost = {name: first.metrics[f"filter/{name}"] for name in ("put_back", "discarded_valid")}
    assert lost == {"put_back": 7, "discarded_valid": 7}
    assert first.metrics["filter/discarded_unfinished"] == 1
    assert [group.prompt.id for group in second.groups] == ["p5", "p6", "p7", "p8"]


@pytest.mark.parametrize("sections", [CONTINUE, ASYNC_1, ASYNC_3], ids=str)
def test_a_response_that_a_step_had_no_time_to_wait_for_is_not_trained_on_too_late(
    sections: Sections,
) -> None:
    world = World(target=4, slots=12, keep_rate=0.9, max_seconds=15.0, when_short="train")
    run = whole_run(replace(world, train_seconds=1.0), sections)
    lost = sum(
        step.metrics["filter/discarded_unfinished"] + step.metrics["filter/discarded_stale"]
        for step in run.steps
    )
    assert lost > 0 or sections is ASYNC_3
    for version, step in enumerate(run.steps):
        ages = [version - r.policy_version for group in step.groups for r in group.responses]
        assert max(ages) <= run.rollout.max_staleness


@pytest.mark.parametrize("sections", ALL, ids=str)
@pytest.mark.parametrize("seconds", [5.0, 30.0, 45.0])
def test_after_the_loss_of_all_engines_the_step_goes_on_where_it_stood(
    sections: Sections, seconds: float
) -> None:
    world = World(target=6, slots=4, keep_rate=0.7)

    async def run() -> tuple[Run, int]:
        run = Run(world, sections)

        async def kill() -> None:
            await asyncio.sleep(seconds)
            for engine in run.engines:
                engine.die()

        killer = asyncio.ensure_future(kill())
        with pytest.raises(EnginesLost, match="all 2 rollout engines are lost"):
            await run.scheduler.collect(1, 0)
        await killer
        before = sum(len(draft.members) for draft in run.scheduler.snapshot().unfinished)
        run.replace_engines()
        await run.train()
        await run.scheduler.close()
        return run, before

    done, before = simulate(run())
    assert before > 0
    assert [len(step.groups) for step in done.steps] == [6] * 5
    seeds = Counter(response.seed for response in done.responses)
    assert max(seeds.values()) == 1
    if sections in (DROP, FINISH, ONE_STEP_OFF):
        assert [s.groups for s in done.steps] == [
            s.groups for s in whole_run(world, sections).steps
        ]


def test_a_halted_step_is_over_before_the_next_one_begins() -> None:
    async def run() -> None:
        run = Run(World(target=6, slots=4), DROP)
        for engine in run.engines:
            engine.die()
        with pytest.raises(EnginesLost):
            await run.scheduler.collect(1, 0)
        run.replace_engines()
        with pytest.raises(AssertionError, match="step 1 was halted and is not over: not yet 2"):
            await run.scheduler.collect(2, 0)
        await run.scheduler.close()

    simulate(run())


def test_engines_that_are_lost_between_two_steps_stop_the_next_one_only() -> None:
    async def run() -> Run:
        run = Run(World(target=6, slots=4), ONE_STEP_OFF)
        await run.scheduler.collect(1, 0)
        await asyncio.sleep(5)
        for engine in run.engines:
            engine.die()
        await run.scheduler.drain()
        run.replace_engines()
        await run.update(1)
        run.steps.append(await run.scheduler.collect(2, 1))
        await run.scheduler.close()
        return run

    assert len(simulate(run()).steps[0].groups) == 6


@pytest.mark.parametrize("hurry", [False, True])
def test_a_step_that_was_halted_ahead_is_whole_from_the_new_weights_and_can_be_saved(
    hurry: bool,
) -> None:
    async def run() -> tuple[Run, Run]:
        first = Run(World(target=6, slots=4), ONE_STEP_OFF)
        await first.scheduler.collect(1, 0)
        taken = first.order.taken
        await asyncio.sleep(45)
        assert taken < first.order.taken
        for engine in first.engines:
            engine.die()
        await asyncio.sleep(1)
        if not hurry:
            await first.scheduler.drain()
        await first.scheduler.settle(hurry=hurry)
        state = {"taken": first.order.taken, "sampling": first.scheduler.state_dict()}
        second = Run(World(target=6, slots=4), ONE_STEP_OFF, json.loads(json.dumps(state)))
        for one in (first, second):
            one.replace_engines()
            await one.update(1)
            assert one.order.taken == taken
            one.steps.append(await one.scheduler.collect(2, 1))
            await one.scheduler.close()
        return first, second

    for done in simulate(run()):
        assert {response.policy_version for response in done.responses} == {1}
        assert len(done.steps[0].groups) == 6


@pytest.mark.parametrize("sections", ALL, ids=str)
def test_graders_that_fail_too_often_stop_the_run(sections: Sections) -> None:
    async def failing(prompt: Prompt, response: Response) -> tuple[Response, Reward]:
        if response.sample_index == 0:
            return response, Reward(None, 0.0)
        return await graded(prompt, response)

    async def run(share: float) -> Run:
        world = World(group_size=4, max_error_share=share, slots=8)
        return await Run(world, sections, grader=failing).train(last=1)

    allowed = simulate(run(0.25)).steps[0]
    assert allowed.metrics["reward/errors"] == len(allowed.generated)
    with pytest.raises(TooManyGradingErrors, match=r"share of 0\.250: at most reward\.max_error"):
        simulate(run(0.24))


def test_what_the_first_failing_graders_said_is_told() -> None:
    group = Group(
        Prompt("p", "", (3,), "1"),
        (Response("p", 0, (2,), (-1.0,), "stop", 0, 0),),
        (Reward(None, 0.0),),
    )
    assert check_grading_errors([group], 1.0) == 1
    with pytest.raises(TooManyGradingErrors, match=r"first failures:\n- raised: boom\n- late"):
        check_grading_errors([group], 0.9, ["raised: boom", "late"])


@pytest.mark.parametrize("sections", ALL, ids=str)
def test_a_cancelled_step_leaves_nothing_running(sections: Sections) -> None:
    async def run() -> Run:
        run = Run(World(target=6), sections)
        step = asyncio.ensure_future(run.scheduler.collect(1, 0))
        await asyncio.sleep(10)
        assert any(engine.running for engine in run.engines)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await asyncio.sleep(0)
        return run

    assert all(engine.running == 0 for engine in simulate(run()).engines)


@pytest.mark.parametrize("sections", ALL, ids=str)
def test_a_snapshot_before_a_step_is_gone_on_with_as_if_the_step_had_not_been(
    sections: Sections,
) -> None:
    world = World(target=4, slots=6)

    async def stopped() -> tuple[Run, dict[str, object]]:
        first = await Run(world, sections).train(last=2)
        taken, state = first.order.taken, first.scheduler.snapshot()
        step = asyncio.ensure_future(first.scheduler.collect(3, 2))
        await asyncio.sleep(15)
        step.cancel()
        await asyncio.wait({step})
        return first, json.loads(json.dumps({"taken": taken, "sampling": state_to_json(state)}))

    async def run() -> tuple[Run, Run]:
        first, state = await stopped()
        second = Run(world, sections, state)
        await second.train(first=3)
        await second.scheduler.close()
        return first, second

    first, second = simulate(run())
    seeds = Counter(response.seed for response in first.responses + second.responses)
    assert max(seeds.values()) == 1
    assert [len(step.groups) for step in second.steps] == [4] * 3
    if sections in (DROP, FINISH, ONE_STEP_OFF):
        straight = whole_run(world, sections).steps
        assert [s.groups for s in first.steps + second.steps] == [s.groups for s in straight]


@pytest.mark.parametrize("sections", [ONE_STEP_OFF, ASYNC_FINISH, ASYNC_3, CONTINUE], ids=str)
def test_a_stop_in_a_hurry_waits_for_no_response_and_loses_no_prompt(sections: Sections) -> None:
    world = World(target=6, slots=2)

    async def run() -> tuple[float, Run, Run]:
        loop = asyncio.get_running_loop()
        first = Run(world, sections)
        first.steps.append(await first.scheduler.collect(1, 0))
        await asyncio.sleep(1)
        started = loop.time()
        await first.scheduler.settle(hurry=True)
        seconds = loop.time() - started
        state = {"taken": first.order.taken, "sampling": first.scheduler.state_dict()}
        await first.scheduler.close()
        second = Run(world, sections, json.loads(json.dumps(state)))
        await second.train(first=2)
        await second.scheduler.close()
        return seconds, first, second

    seconds, first, second = simulate(run())
    assert seconds < 2
    assert [len(step.groups) for step in second.steps] == [6] * 4
    seeds = Counter(response.seed for response in first.responses + second.responses)
    assert max(seeds.values()) == 1
    events = [(g.prompt.id, g.responses[0].seed) for s in second.steps for g in s.generated]
    assert len(set(events)) == len(events)


def test_a_checkpoint_with_unfinished_responses_needs_a_schedule_that_continues_them() -> None:
    async def run() -> None:
        first = await Run(World(), CONTINUE).train(last=1)
        state = await first.saved()
        assert state["sampling"]["unfinished"]  # type: ignore[index]
        with pytest.raises(RuntimeError, match=r"resume with .*sampling\.unfinished=continue"):
            Run(World(), FINISH, state)

    simulate(run())


def test_a_checkpoint_with_groups_of_earlier_weights_needs_a_schedule_that_expects_them() -> None:
    async def run() -> None:
        first = await Run(World(first_wave=12), FINISH).train(last=1)
        state = await first.saved()
        assert state["sampling"]["ready"]  # type: ignore[index]
        with pytest.raises(RuntimeError, match=r"resume with sampling\.surplus=carry"):
            Run(World(), DROP, state)
        second = await Run(World(), ONE_STEP_OFF).train(last=1)
        with pytest.raises(RuntimeError, match=r"step 2 .* resume with rollout\.mode=one_step_off"):
            Run(World(), DROP, await second.saved())

    simulate(run())


def test_async_samples_on_after_a_checkpoint_that_waited_for_all_responses() -> None:
    async def run() -> tuple[int, int]:
        run = Run(World(target=4, slots=3), ASYNC_FINISH)
        await run.scheduler.collect(1, 0)
        assert (await run.saved())["sampling"]["unfinished"] == []  # type: ignore[index]
        before = run.order.taken
        await asyncio.sleep(5)
        running = sum(engine.running for engine in run.engines)
        await run.scheduler.close()
        return run.order.taken - before, running

    drawn, running = simulate(run())
    assert drawn > 0 and running > 0


def test_a_schedule_goes_on_with_unfinished_responses_where_it_says_so() -> None:
    """The check at the start and the scheduler's choice are one predicate."""
    for rollout, sampling in ALL:
        run = Run(World(), (rollout, sampling))
        chosen = isinstance(run.scheduler._way, Streaming)
        expected = goes_on_with_unfinished(run.rollout, SamplingConfig(**sampling))  # type: ignore[arg-type]
        assert chosen == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (World(group_size=2), r"3 responses and rollout\.group_size=2"),
        (World(target=2), r"^rollout\.prompts_per_step=2: .* with 3 groups: resume with rollout"),
        (World(target=4), r"^rollout\.prompts_per_step=4: .*=train or rollout\.prompts_per_step=3"),
    ],
    ids=["group size", "smaller step", "larger step"],
)
def test_a_step_that_was_sampled_ahead_is_trained_on_as_it_is_or_refused(
    changed: World, message: str
) -> None:
    async def run() -> None:
        first = await Run(World(), ONE_STEP_OFF).train(last=1)
        state = await first.saved()
        with pytest.raises(RuntimeError, match=message):
            Run(changed, ONE_STEP_OFF, state)
        short = Run(World(target=4, when_short="train"), ONE_STEP_OFF, state)
        await short.train(first=2, last=2)
        assert len(short.steps[0].groups) == 3
        await short.scheduler.close()

    simulate(run())


def test_waiting_responses_over_the_limit_of_tokens_are_refused() -> None:
    sampling = SamplingConfig(**FINISH[1])  # type: ignore[arg-type]

    async def run() -> tuple[RolloutConfig, Any]:
        first = await Run(World(first_wave=12), FINISH).train(last=1)
        return first.rollout, (await first.saved())["sampling"]

    rollout, state = simulate(run())
    groups = [draft.group for draft in usable_state(state, rollout, sampling).ready]
    longest = max(len(r.token_ids) for group in groups if group for r in group.responses)
    usable_state(state, rollout.model_copy(update={"max_response_tokens": longest}), sampling)
    shorter = rollout.model_copy(update={"max_response_tokens": longest - 1})
    told = rf"^rollout\.max_response_tokens={longest - 1}: .*at least {longest}, "
    with pytest.raises(DraftStateError, match=told):
        usable_state(state, shorter, sampling)


FAILURES = {
    "too few groups": (NotEnoughGroups, Reward(0.0, -1.0)),
    "graders": (TooManyGradingErrors, Reward(None, 0.0)),
    "a grader that is broken": (ZeroDivisionError, None),
}


@pytest.mark.parametrize("hurry", [False, True])
@pytest.mark.parametrize("how", FAILURES)
def test_prompts_of_a_step_that_failed_ahead_come_again_in_a_run_that_goes_on(
    how: str, hurry: bool
) -> None:
    kind, verdict = FAILURES[how]
    world = World(max_rounds=2, slots=6, first_wave=12, max_error_share=0.5)

    async def run() -> tuple[Run, int, Run]:
        first = Run(world, ONE_STEP_OFF)

        async def failing(prompt: Prompt, response: Response) -> tuple[Response, Reward]:
            if first.steps and verdict is None:
                raise ZeroDivisionError("a broken grader")
            if first.steps and verdict is not None:
                return response, verdict
            return await graded(prompt, response)

        first = Run(world, ONE_STEP_OFF, grader=failing)
        first.steps.append(await first.scheduler.collect(1, 0))
        taken = first.order.taken
        await asyncio.sleep(2000)
        assert first.order.taken > taken or verdict is None
        for _ in range(2):  # an update drains, and then a checkpoint settles
            await first.scheduler.settle(hurry=hurry)
            assert first.order.taken == taken
        state = {"taken": first.order.taken, "sampling": first.scheduler.state_dict()}
        assert state["sampling"]["ahead"] is None  # type: ignore[index]
        with pytest.raises(kind):
            await first.scheduler.collect(2, 1)
        second = Run(world, ONE_STEP_OFF, json.loads(json.dumps(state)))
        await second.train(first=2, last=2)
        await second.scheduler.close()
        return first, taken, second

    first, taken, second = simulate(run())
    assert first.order.taken == taken
    first_of_second = second.steps[0].generated[0].prompt
    assert first_of_second == first.order.prompts[taken % len(first.order.prompts)]
