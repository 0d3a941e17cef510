"""Sampling ahead of training and across steps, with real engines: continued responses are exact."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from transformers import PreTrainedModel

from megatron_dapo.checkpoint.commit import CHECKPOINTS, step_folder
from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.engine import GenerationRequest, GenerationResult
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.rollout.scheduler import GroupScheduler
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.types import Prompt, Response, Reward
from tests.e2e.conftest import (
    PARITY,
    RunningServer,
    expected_logprobs,
    running_server,
)
from tests.e2e.runs import Run, Start, make_start, train
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(3600)
GROUP_SIZE = 4
MOST_TOKENS = 160
STOPS = tuple(range(2, 14))
"""Twelve of 512 tokens: a response has about 40 of them, and one in fifty hits the limit."""


class Order:
    """Prompts without an end."""

    def __init__(self) -> None:
        self.given = 0

    def take(self, count: int) -> list[Prompt]:
        first, self.given = self.given, self.given + count
        return [Prompt(str(n), "", (n % 300 + 20, 19, 30), "1") for n in range(first, self.given)]

    def put_back(self, count: int) -> None:
        self.given -= count


def goes_to_the_limit(prompt_tokens: Sequence[int]) -> bool:
    """Every third prompt's responses do not stop, so that each step ends before some of them."""
    return prompt_tokens[0] % 3 == 0


async def grade(prompt: Prompt, response: Response) -> tuple[Response, Reward]:
    return response, Reward(float(response.token_ids[-1] % 2), 0.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory, "qwen3", max_sequences=16) as running:
        yield running


@pytest.fixture(scope="module")
def continued(server: RunningServer) -> tuple[list[RolloutStep], list[PreTrainedModel]]:
    """Three steps whose responses are interrupted at their end, and the weights of each version."""
    models = [server.model, *(tiny_model("qwen3", seed=seed) for seed in (11, 12))]
    published = [server.publish(model, version) for version, model in enumerate(models) if version]

    async def collect(engine: VllmEngine) -> list[RolloutStep]:
        async def generate(request: GenerationRequest) -> GenerationResult:
            if goes_to_the_limit(request.prompt_token_ids):
                request = dataclasses.replace(request, stop_token_ids=())
            return await engine.generate(request)

        scheduler = GroupScheduler(
            generate,
            Order(),
            grade,
            RolloutConfig(
                prompts_per_step=2,
                group_size=GROUP_SIZE,
                max_response_tokens=MOST_TOKENS,
                max_staleness=2,
            ),
            SamplingConfig(surplus="carry", unfinished="continue"),
            interrupt=engine.interrupt,
            seed=5,
            stop_token_ids=STOPS,
            capacity=lambda: 16,
        )
        steps = []
        for step in range(1, 4):
            steps.append(await scheduler.collect(step, step - 1))
            if step < 3:
                await published[step - 1].install(engine)
        await scheduler.close()
        return steps

    return server.run(collect), models


def responses_of(steps: Sequence[RolloutStep]) -> list[tuple[Prompt, Response]]:
    return [(g.prompt, r) for step in steps for g in step.generated for r in g.responses]


def test_responses_go_on_over_the_updates_between_steps(
    continued: tuple[list[RolloutStep], list[PreTrainedModel]],
) -> None:
    steps, _ = continued
    assert [len(step.groups) for step in steps] == [2, 2, 2]
    assert all(group.mixed for step in steps for group in step.groups)
    assert sum(step.metrics["filter/continued"] for step in steps) > 0
    pieces = [r for _, r in responses_of(steps) if len(r.version_spans) > 1]
    assert pieces
    for version, step in enumerate(steps):
        oldest = [version - r.policy_version for g in step.groups for r in g.responses]
        assert step.metrics["rollout/staleness/max"] == max(oldest) <= 2
    seeds = [response.seed for _, response in responses_of(steps)]
    assert len(set(seeds)) == len(seeds)


def test_each_part_of_a_continued_response_has_the_log_probs_of_its_own_weights(
    continued: tuple[list[RolloutStep], list[PreTrainedModel]],
) -> None:
    steps, models = continued
    for prompt, response in responses_of(steps):
        starts = [start for start, _ in response.version_spans]
        ends = [*starts[1:], len(response.token_ids)]
        assert starts[0] == 0
        for (start, version), end in zip(response.version_spans, ends, strict=True):
            expected = expected_logprobs(
                models[version], prompt.token_ids, response.token_ids, temperature=1.0
            )[start:end]
            told = torch.tensor(response.rollout_logprobs[start:end])
            assert (told - expected).abs().max() <= PARITY


def test_a_continued_response_ends_as_an_uninterrupted_one_does(
    continued: tuple[list[RolloutStep], list[PreTrainedModel]],
) -> None:
    for prompt, response in responses_of(continued[0]):
        ended = [token in STOPS for token in response.token_ids]
        if not goes_to_the_limit(prompt.token_ids):
            assert not any(ended[:-1])
        if response.finish_reason == "stop":
            assert ended[-1]
        else:
            assert response.finish_reason == "length"
            assert len(response.token_ids) == MOST_TOKENS


ONE_STEP_OFF = ("rollout.mode=one_step_off", "loss.mismatch=tis_token")
ASYNC = (
    *("rollout.mode=async", "rollout.max_staleness=2", "loss.mismatch=tis_token"),
    *("sampling.surplus=carry", "sampling.unfinished=continue", "resharding.in_flight=keep"),
)


ONE_STEP_OFF += ("training.steps=3", "checkpoint.every=1", "checkpoint.keep=3")


@pytest.fixture(scope="module")
def start(
    server: RunningServer,
    continued: tuple[list[RolloutStep], list[PreTrainedModel]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Start:
    """Of runs on the same server; they come after `continued`, and leave other weights there."""
    start = make_start(tmp_path_factory.mktemp("runs"), "qwen3")
    tree = yaml.safe_load(start.file.read_text())
    tree["rollout"] |= {"endpoints": [server.server.endpoint], "max_concurrent_sequences": 16}
    start.file.write_text(yaml.safe_dump(tree))
    return start


@pytest.fixture(scope="module")
def one_step_off(start: Start) -> Run:
    return train(start, "one_step_off", *ONE_STEP_OFF)


def trains_soundly(run: Run) -> None:
    for metrics in run.metrics.values():
        assert metrics["filter/kept"] == run.config.rollout.prompts_per_step
        assert math.isfinite(metrics["actor/grad_norm"])
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/skipped_steps"] == 0
    # A step that finds all its groups sampled already, as the last one may, samples none itself.
    sampled = [metrics["rollout/tokens_per_trained_token"] for metrics in run.metrics.values()]
    assert sampled[0] >= 1 and min(sampled) >= 0


def test_one_step_off_trains_on_whole_groups_of_the_version_before(one_step_off: Run) -> None:
    trains_soundly(one_step_off)
    staleness = {step: m["rollout/staleness/mean"] for step, m in one_step_off.metrics.items()}
    assert staleness == {1: 0.0, 2: 1.0, 3: 1.0}
    for metrics in one_step_off.metrics.values():
        assert metrics["rollout/mixed_version_responses"] == 0
    gaps = [metrics["training/mismatch_max"] for metrics in one_step_off.metrics.values()]
    assert gaps[0] <= 1e-4 < min(gaps[1:])


@pytest.mark.slow
def test_one_step_off_resumes_with_the_step_that_was_sampled_ahead(one_step_off: Run) -> None:
    again = one_step_off.folder.with_name("one_step_off_again")
    shutil.copytree(one_step_off.folder, again)
    shutil.rmtree(step_folder(again / CHECKPOINTS, 3))
    shutil.rmtree(again / "hf")
    resumed = train(one_step_off.start, again.name, *ONE_STEP_OFF)
    assert "step_00000002" in resumed.finished.output
    timed = ("timing_s/", "perf/", "rollout/tokens", "rollout/grade", "filter/put_back")
    timed += ("filter/discarded",)

    def told(run: Run) -> dict[str, float]:
        return {n: v for n, v in run.metrics[3].items() if not n.startswith(timed)}

    assert told(resumed) == pytest.approx(told(one_step_off), rel=1e-6, abs=1e-9)


def test_async_trains_on_what_is_at_most_two_versions_old(start: Start) -> None:
    run = train(start, "async", *ASYNC, "training.steps=4")
    trains_soundly(run)
    oldest = [metrics["rollout/staleness/max"] for metrics in run.metrics.values()]
    assert oldest[0] == 0 and 1 <= max(oldest) <= 2
    assert Path(run.hf / "config.json").is_file()
