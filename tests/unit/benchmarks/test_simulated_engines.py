"""Simulated engines keep their speed law, their length law and the promises of an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics

import pytest

from benchmarks.simulated_engines import (
    BLOCK,
    LengthLaw,
    SimulatedEngine,
    SpeedLaw,
    grade,
    mixed_share,
    simulated_prompts,
)
from benchmarks.simulated_loop import simulate
from megatron_dapo.rollout.engine import EngineUnavailable, GenerationRequest, GenerationResult
from megatron_dapo.types import Group, Prompt, Response

LENGTHS = LengthLaw()
PROMPTS = simulated_prompts(256, 0.5, 16, LENGTHS)
MOST_BLOCKS = 320


def request(
    prompt: Prompt, seed: int, known: tuple[int, ...] = (), most: int = MOST_BLOCKS
) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=prompt.token_ids + known,
        seed=seed,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=most - len(known),
        stop_token_ids=(2,),
        request_id=f"test-{seed}",
    )


def response_of(prompt: Prompt, index: int, result: GenerationResult) -> Response:
    return Response(
        prompt.id,
        index,
        result.token_ids,
        result.logprobs,
        result.finish_reason,
        result.policy_version,
        seed=0,
        version_spans=result.version_spans,
    )


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("together", [1, 8, 64])
def test_speed_falls_with_the_number_of_running_sequences(together: int) -> None:
    speed = SpeedLaw(step_seconds=0.02, sequence_seconds=0.001)

    async def work() -> tuple[int, float, float]:
        engine = SimulatedEngine(0, 64, speed=speed)
        same = request(PROMPTS[0], 5)
        results = await asyncio.gather(*(engine.generate(same) for _ in range(together)))
        engine.count_up_to_now()
        assert engine.decoded_blocks == pytest.approx(sum(len(r.token_ids) for r in results))
        return len(results[0].token_ids), now(), engine.slot_seconds

    blocks, seconds, slot_seconds = simulate(work())
    assert seconds == pytest.approx(blocks * BLOCK * (0.02 + 0.001 * together))
    assert slot_seconds == pytest.approx(seconds * together)


def test_a_long_sequence_speeds_up_when_a_short_one_ends() -> None:
    speed = SpeedLaw(step_seconds=0.02, sequence_seconds=0.01)

    async def work() -> tuple[float, float]:
        engine = SimulatedEngine(0, 2, speed=speed)
        long = request(dataclasses.replace(PROMPTS[0], token_ids=(500, 50_000, 0)), 1, most=100)
        short = dataclasses.replace(long, max_tokens=10, seed=2)
        ended = {}

        async def one(name: str, wanted: GenerationRequest) -> None:
            result = await engine.generate(wanted)
            assert result.finish_reason == "length"
            ended[name] = now()

        await asyncio.gather(one("long", long), one("short", short))
        return ended["short"], ended["long"]

    short, long = simulate(work())
    assert short == pytest.approx(10 * BLOCK * 0.04)
    assert long == pytest.approx(short + 90 * BLOCK * 0.03)


def test_a_full_engine_lets_others_wait_in_order() -> None:
    async def work() -> list[int]:
        engine = SimulatedEngine(0, 2)
        ended: list[int] = []

        async def one(index: int) -> None:
            await engine.generate(dataclasses.replace(request(PROMPTS[0], 7), max_tokens=5))
            assert engine.running <= 2
            ended.append(index)

        await asyncio.gather(*(one(index) for index in range(8)))
        return ended

    assert simulate(work()) == list(range(8))


def test_lengths_are_lognormal_and_fixed_by_the_seed() -> None:
    law = LengthLaw(median_tokens=2000, within_group=0.75)
    drawn = [law.blocks(1000, seed) * BLOCK for seed in range(20_000)]
    logs = [math.log(length) for length in drawn]
    assert statistics.median(drawn) == pytest.approx(2000, rel=0.03)
    assert statistics.stdev(logs) == pytest.approx(0.75, rel=0.03)
    assert drawn[:100] == [law.blocks(1000, seed) * BLOCK for seed in range(100)]


@pytest.mark.parametrize("keep_rate", [0.2, 0.5, 0.9])
def test_groups_are_mixed_at_the_chosen_rate(keep_rate: float) -> None:
    prompts = simulated_prompts(400, keep_rate, 8, LENGTHS, seed=3)
    assert statistics.mean(mixed_share(p, 8) for p in prompts) == pytest.approx(keep_rate, abs=0.05)

    async def work() -> float:
        engine = SimulatedEngine(0, 4000)
        groups = []
        for number, prompt in enumerate(prompts):
            results = await asyncio.gather(
                *(engine.generate(request(prompt, 8 * number + index)) for index in range(8))
            )
            responses = tuple(response_of(prompt, i, r) for i, r in enumerate(results))
            groups.append(Group(prompt, responses, tuple(grade(prompt, r) for r in responses)))
        return statistics.mean(group.mixed for group in groups)

    expected = statistics.mean(mixed_share(prompt, 8) for prompt in prompts)
    assert simulate(work()) == pytest.approx(expected, abs=0.06)


def test_an_interrupted_response_goes_on_as_if_nothing_had_happened() -> None:
    async def work() -> None:
        engine, interrupted = SimulatedEngine(0, 64, keep_in_flight=True), 0
        for seed in range(20):
            whole = await engine.generate(request(PROMPTS[seed], seed))
            known: tuple[int, ...] = ()
            logprobs: tuple[float, ...] = ()
            attempts = 0
            while True:
                resumed = request(PROMPTS[seed], seed + 1000 * attempts, known)
                asked = asyncio.create_task(engine.generate(resumed))
                await asyncio.sleep(7.0)
                await engine.interrupt()
                part = await asked
                assert part.version_spans == ((0, engine.version),)
                known, logprobs = known + part.token_ids, logprobs + part.logprobs
                attempts += 1
                if part.finish_reason != "abort":
                    break
                await engine.update(engine.version + 1, 1.0)
            assert known == whole.token_ids
            assert len(logprobs) == len(known)
            assert part.finish_reason == whole.finish_reason
            interrupted += attempts > 1
        assert interrupted > 10

    simulate(work())


def test_reading_the_known_tokens_again_takes_its_time() -> None:
    speed = SpeedLaw(step_seconds=0.02, sequence_seconds=0.0, prefill_seconds=0.001)

    async def work() -> None:
        engine = SimulatedEngine(0, 1, speed=speed)
        long = dataclasses.replace(PROMPTS[0], token_ids=(500, 50_000, 0))
        asked = asyncio.create_task(engine.generate(request(long, 1, most=100)))
        await asyncio.sleep(40.5 * BLOCK * 0.02)
        await engine.interrupt()
        known = (await asked).token_ids
        assert len(known) == 40
        started = now()
        await engine.generate(request(long, 2, known, most=100))
        assert now() - started == pytest.approx(40 * BLOCK * 0.001 + 60 * BLOCK * 0.02)

    simulate(work())


def test_an_update_waits_for_running_requests_and_new_ones_wait_for_it() -> None:
    async def work() -> None:
        engine = SimulatedEngine(0, 4)
        first = asyncio.create_task(engine.generate(request(PROMPTS[0], 1)))
        await asyncio.sleep(0.1)
        update = asyncio.create_task(engine.update(1, 10.0))
        await asyncio.sleep(0)
        second = asyncio.create_task(engine.generate(request(PROMPTS[0], 2)))
        await first
        ended = now()
        await update
        assert now() == pytest.approx(ended + 10)
        assert (await first).version_spans == ((0, 0),)
        assert (await second).version_spans == ((0, 1),)

    simulate(work())


def test_a_request_that_stays_in_flight_carries_both_versions_and_loses_the_pause() -> None:
    speed = SpeedLaw(step_seconds=0.02, sequence_seconds=0.0, prefill_seconds=0.001)

    async def work() -> None:
        engine = SimulatedEngine(0, 4, speed=speed, keep_in_flight=True)
        long = dataclasses.replace(PROMPTS[0], token_ids=(500, 50_000, 0))
        asked = asyncio.create_task(engine.generate(request(long, 1, most=100)))
        await asyncio.sleep(30.5 * BLOCK * 0.02)
        await engine.update(1, 10.0)
        result = await asked
        assert result.version_spans == ((0, 0), (30, 1))
        assert result.policy_version == 0
        assert now() == pytest.approx(100 * BLOCK * 0.02 + 10 + 30 * BLOCK * 0.001)

    simulate(work())


def test_whoever_goes_away_frees_the_slot() -> None:
    async def work() -> None:
        engine = SimulatedEngine(0, 1)
        asked = [asyncio.create_task(engine.generate(request(PROMPTS[0], s))) for s in range(3)]
        await asyncio.sleep(0.1)
        asked[0].cancel()
        asked[1].cancel()
        await asked[2]
        assert engine.running == 0
        alone = await SimulatedEngine(1, 1).generate(request(PROMPTS[0], 2))
        assert (await asked[2]).token_ids == alone.token_ids

    simulate(work())


def test_a_dead_engine_answers_nobody_and_a_hung_one_until_it_is_noticed() -> None:
    async def work() -> None:
        dead, hung = SimulatedEngine(0, 4), SimulatedEngine(1, 4)
        asked = asyncio.create_task(dead.generate(request(PROMPTS[0], 1)))
        await asyncio.sleep(0.1)
        dead.die()
        with pytest.raises(EngineUnavailable, match="simulated engine 0"):
            await asked
        with pytest.raises(EngineUnavailable):
            await dead.generate(request(PROMPTS[0], 2))
        assert not dead.alive

        hanging = asyncio.create_task(hung.hang(60.0))
        started = now()
        with pytest.raises(EngineUnavailable, match="no heartbeat"):
            await hung.generate(request(PROMPTS[0], 1))
        assert now() == pytest.approx(started + 60)
        await hanging

    simulate(work())


def test_a_slow_engine_is_slow_by_its_factor() -> None:
    async def work() -> float:
        engine = SimulatedEngine(0, 4)
        await engine.generate(request(PROMPTS[0], 1))
        once = now()
        engine.slow_down(4.0)
        await engine.generate(request(PROMPTS[0], 1))
        return (now() - once) / once

    assert simulate(work()) == pytest.approx(4.0)
