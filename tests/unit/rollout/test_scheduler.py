from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.engine import EngineError, GenerationRequest, GenerationResult
from megatron_dapo.rollout.member_sampler import EnginesLost
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.rollout.selection import NotEnoughGroups
from megatron_dapo.types import FinishReason, Prompt, Response, Reward
from tests.unit.rollout.fake_engine import STOP, FakeEngine, Source, decode, grade
from tests.unit.rollout.scheduling import Rollouts, collect_step


def collect(
    engines: list[FakeEngine],
    source: Source,
    *,
    sampling: SamplingConfig | None = None,
    step: int = 1,
    policy_version: int = 0,
    grader=grade,
    **rollout: object,
) -> RolloutStep:
    config = RolloutConfig(**{"prompts_per_step": 8, "group_size": 4, **rollout})  # type: ignore[arg-type]
    rollouts = Rollouts(engines, source, config, sampling or SamplingConfig(), grade=grader)
    return collect_step(rollouts, step, policy_version)


def test_exactly_the_target_number_of_mixed_groups_comes_back() -> None:
    step = collect([FakeEngine()], Source((0, 50, 100)))
    assert len(step.groups) == 8
    assert all(group.mixed for group in step.groups)
    assert step.metrics["filter/kept"] == 8
    assert step.metrics["filter/generated"] == len(step.generated)
    assert step.metrics["filter/num_gen_batches"] > 1


def test_groups_come_in_submission_order_whatever_finishes_first() -> None:
    engine = FakeEngine(seconds=lambda request: 0.02 / (1 + request.prompt_token_ids[2]))
    step = collect([engine], Source((50,)))
    numbers = [int(group.prompt.id[1:]) for group in step.groups]
    assert numbers == sorted(numbers)
    assert [r.sample_index for r in step.groups[0].responses] == [0, 1, 2, 3]


def test_later_rounds_ask_for_what_is_missing() -> None:
    source = Source((0, 50))  # half of the prompts are hopeless
    step = collect([FakeEngine()], source, prompts_per_step=30, group_size=8)
    assert source.asked[0] == 30
    assert sum(source.asked) == pytest.approx(2 * 30, abs=12)  # refills, as groups come back
    assert step.metrics["filter/num_gen_batches"] <= 4


@pytest.mark.parametrize("first", [1, 3, 8, 40])
def test_any_size_of_the_first_round_fills_the_step(first: int) -> None:
    source = Source((50,))
    step = collect([FakeEngine()], source, sampling=SamplingConfig(prompts_per_round=first))
    assert source.asked[0] == first
    assert len(step.groups) == 8


def test_surplus_groups_are_dropped_and_counted() -> None:
    sampling = SamplingConfig(prompts_per_round=40)
    engine = FakeEngine(seconds=lambda request: 0.1 if request.prompt_token_ids[2] < 8 else 0.0)
    step = collect([engine], Source((50,)), sampling=sampling)
    assert len(step.groups) == 8
    assert step.counts.surplus == 0
    assert 0 < step.metrics["filter/discarded_valid"] <= step.metrics["filter/put_back"]
    assert step.metrics["filter/put_back"] + step.metrics["filter/generated"] == 40


@pytest.mark.parametrize(("percent", "side"), [(0, "all_wrong"), (100, "all_right")])
def test_too_few_groups_stop_with_the_counts(percent: int, side: str) -> None:
    sampling = SamplingConfig(max_rounds=3)
    source = Source((percent,))
    with pytest.raises(NotEnoughGroups) as caught:
        collect([FakeEngine()], source, sampling=sampling)
    assert source.given == 3 * 8
    assert getattr(caught.value.counts, side) == 24
    right = 4 if percent else 0
    assert f"Groups by number of right responses: {right}: 24." in str(caught.value)


def test_too_few_groups_may_be_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    sampling = SamplingConfig(max_rounds=1, when_short="train")
    step = collect([FakeEngine()], Source((0, 50)), sampling=sampling)
    assert 0 < len(step.groups) < 8
    assert f"only {len(step.groups)} of 8 groups" in caplog.text
    assert "when_short" not in caplog.text  # nobody is told to do what is done


def test_not_one_group_is_never_trained_on() -> None:
    sampling = SamplingConfig(max_rounds=2, when_short="train")
    with pytest.raises(
        NotEnoughGroups, match=r"no gradient .*stops with sampling\.when_short=train"
    ):
        collect([FakeEngine()], Source((0,)), sampling=sampling)


def test_without_dynamic_sampling_one_round_keeps_everything() -> None:
    source = Source((0, 100))
    step = collect([FakeEngine()], source, sampling=SamplingConfig(dynamic=False))
    assert source.asked == [8]
    assert [group.prompt.id for group in step.groups] == [f"p{i}" for i in range(8)]


def test_aborted_responses_are_not_graded_and_make_no_group_mixed() -> None:
    graded = []

    def recording(prompt: Prompt, response: Response) -> Reward:
        graded.append(response)
        return grade(prompt, response)

    def last_is_aborted(request: GenerationRequest) -> FinishReason:
        return "abort" if request.request_id.endswith("-3") else "stop"

    sampling = SamplingConfig(max_rounds=1, when_short="train")
    step = collect(
        [FakeEngine(finish=last_is_aborted)], Source((50,)), sampling=sampling, grader=recording
    )
    assert all(group.rewards[3].accuracy is None for group in step.generated)
    assert all(len({r.accuracy for r in group.rewards[:3]}) == 2 for group in step.groups)
    assert len(graded) == 3 * len(step.generated)
    assert step.metrics["response/aborted_ratio"] == 0.25


def test_seeds_differ_inside_a_step_and_between_steps_and_repeat_on_a_second_run() -> None:
    def seeds(step: int) -> list[int]:
        rollout = collect([FakeEngine(), FakeEngine()], Source((50,)), step=step)
        return [response.seed for group in rollout.generated for response in group.responses]

    first, second, again = seeds(1), seeds(2), seeds(1)
    assert first == again
    assert len(set(first + second)) == len(first) + len(second)


def test_the_result_does_not_depend_on_the_number_of_engines() -> None:
    one = collect([FakeEngine()], Source((20, 50)))
    three = collect([FakeEngine() for _ in range(3)], Source((20, 50)))
    assert one.groups == three.groups


def test_tokens_reach_the_response_as_the_engine_sampled_them() -> None:
    engine = FakeEngine()
    step = collect([engine], Source((50,)))
    again = asyncio.run(engine.generate(engine.requests[5]))
    response = step.generated[1].responses[1]
    assert response.token_ids == again.token_ids
    assert response.rollout_logprobs == again.logprobs
    assert response.text == decode(again.token_ids)
    assert response.token_ids[-1] == STOP


def test_work_goes_to_the_engine_with_less_of_it() -> None:
    slow, fast = FakeEngine(seconds=lambda _: 0.02), FakeEngine(seconds=lambda _: 0.001)
    collect([slow, fast], Source((50,)), prompts_per_step=16, max_concurrent_sequences=2)
    assert len(fast.requests) > 2 * len(slow.requests)
    assert max(slow.most_running, fast.most_running) <= 3


def test_a_dead_engine_loses_no_sample_and_doubles_none() -> None:
    dying, healthy = FakeEngine(dies_after=5), FakeEngine()
    step = collect([dying, healthy], Source((20, 50)))
    assert step.groups == collect([FakeEngine()], Source((20, 50))).groups
    served = Counter(r.request_id for r in dying.requests + healthy.requests)
    assert max(served.values()) == 1


def test_all_engines_dead_ends_the_step() -> None:
    with pytest.raises(EnginesLost, match="all 2 rollout engines are lost"):
        collect([FakeEngine(dies_after=5), FakeEngine(dies_after=0)], Source((50,)))


def test_no_engine_is_a_configuration_error() -> None:
    with pytest.raises(ValueError, match=r"rollout\.engines"):
        collect([], Source((50,)))


def test_an_engine_with_old_weights_is_found_out() -> None:
    with pytest.raises(RuntimeError, match="version 3, expected 4"):
        collect([FakeEngine(version=3)], Source((50,)), policy_version=4)


def test_a_response_carries_every_version_that_sampled_it_and_counts_as_the_oldest() -> None:
    step = collect([FakeEngine(version=4, updated_after=3)], Source((50,)), policy_version=4)
    responses = [response for group in step.generated for response in group.responses]
    mixed = [response for response in responses if len(response.token_ids) > 3]
    assert 0 < len(mixed) < len(responses)
    for response in responses:
        assert response.policy_version == 4
        spans = ((0, 4), (3, 5)) if response in mixed else ((0, 4),)
        assert response.version_spans == spans
    assert step.metrics["rollout/mixed_version_responses"] == len(mixed)


def test_responses_of_newer_weights_than_asked_for_carry_those() -> None:
    step = collect([FakeEngine(version=5)], Source((50,)), policy_version=4)
    versions = {r.policy_version for group in step.generated for r in group.responses}
    assert versions == {5}
    assert step.metrics["rollout/mixed_version_responses"] == 0


def test_a_failure_cancels_what_is_still_running() -> None:
    engine = FakeEngine(seconds=lambda _: 0.05)

    def broken(prompt: Prompt, response: Response) -> Reward:
        raise EngineError("boom")

    with pytest.raises(EngineError, match="boom"):
        collect([engine], Source((50,)), max_concurrent_sequences=2, grader=broken)
    assert len(engine.requests) < 8 * 4


class EmptySource(Source):
    def take(self, count: int) -> list[Prompt]:
        return []


def test_an_empty_prompt_source_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no prompts are left"):
        collect([FakeEngine()], EmptySource((50,)))


def test_metrics_speak_of_all_generated_responses() -> None:
    def first_is_cut(request: GenerationRequest) -> FinishReason:
        return "length" if request.request_id.endswith("-0") else "stop"

    step = collect([FakeEngine(finish=first_is_cut)], Source((0, 50, 100)))
    rewards = [r for group in step.generated for r in group.rewards]
    lengths = sorted(len(r.token_ids) for group in step.generated for r in group.responses)
    expected = {
        "reward/acc/mean": sum(r.accuracy or 0.0 for r in rewards) / len(rewards),
        "reward/mean": sum(r.shaped for r in rewards) / len(rewards),
        "reward/overlong/mean": sum(r.overlong for r in rewards) / len(rewards),
        "reward/tokens/mean": sum(lengths) / len(lengths),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": lengths[-1],
        "response_length/min": lengths[0],
        "response_length/clip_ratio": 0.25,
        "prompt_length/mean": 3.0,
    }
    assert {name: step.metrics[name] for name in expected} == pytest.approx(expected)
    assert lengths[0] <= step.metrics["response_length/p95"] <= lengths[-1]


class Cancelling(FakeEngine):
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if request.request_id.endswith("-3-1"):
            raise asyncio.CancelledError
        return await super().generate(request)


def test_a_request_that_a_library_cancels_ends_the_step_instead_of_being_waited_for() -> None:
    rollout = RolloutConfig(prompts_per_step=8, group_size=4)
    rollouts = Rollouts([Cancelling()], Source((50,)), rollout, SamplingConfig())

    async def run() -> None:
        async with asyncio.timeout(60):
            await rollouts.scheduler.collect(1, 0)

    with pytest.raises(RuntimeError, match="prompt p3 was cancelled"):
        asyncio.run(run())
