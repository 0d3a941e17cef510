"""One dense server: log-probs, seeds, stop tokens, weight updates, what it listens on."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import stat
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.engine import EngineError, GenerationRequest, GenerationResult
from megatron_dapo.rollout.grading import ThreadedGrader
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.rollout.scheduler import GroupScheduler
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.vllm_server import session_members
from megatron_dapo.rollout.weight_update import InFlight
from megatron_dapo.types import Prompt, Response, Reward
from tests.e2e.conftest import (
    PARITY,
    Published,
    RunningServer,
    expected_logprobs,
    generate,
    largest_gap,
    prompts,
    request,
    run_with_engine,
    running_server,
)
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory, "qwen3") as running:
        yield running


def processes(running: RunningServer) -> list[psutil.Process]:
    assert running.server.pid is not None
    return [psutil.Process(pid) for pid in session_members(running.server.pid)]


def test_logprobs_equal_transformers(qwen3: RunningServer) -> None:
    asked = [request(prompt, row) for row, prompt in enumerate(prompts())]
    results = qwen3.run(lambda engine: generate(engine, asked))
    assert largest_gap(qwen3.model, asked, results) <= PARITY
    assert all(result.policy_version == 0 for result in results)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_are_those_of_the_tempered_distribution(
    qwen3: RunningServer, temperature: float
) -> None:
    asked = [request(p, row, temperature=temperature) for row, p in enumerate(prompts())]
    results = qwen3.run(lambda engine: generate(engine, asked))
    assert largest_gap(qwen3.model, asked, results) <= PARITY
    assert largest_gap(qwen3.model, asked, results, temperature=1.0) > 0.1


def test_same_seed_gives_the_same_tokens_in_any_order_and_batch(qwen3: RunningServer) -> None:
    asked = [request(prompt, row) for row, prompt in enumerate(prompts())]
    together = qwen3.run(lambda engine: generate(engine, asked))
    backwards = qwen3.run(lambda engine: generate(engine, asked[::-1]))[::-1]
    alone = qwen3.run(lambda engine: generate(engine, asked[3:4]))
    assert [r.token_ids for r in together] == [r.token_ids for r in backwards]
    assert together[3].token_ids == alone[0].token_ids


def test_different_seeds_give_different_responses(qwen3: RunningServer) -> None:
    asked = [request((5, 6, 7), row) for row in range(8)]
    results = qwen3.run(lambda engine: generate(engine, asked))
    assert len({result.token_ids for result in results}) == 8


def test_a_stop_token_ends_the_response_and_belongs_to_it(qwen3: RunningServer) -> None:
    free = request((5, 6, 7), temperature=0.0, stop_token_ids=())
    (whole,) = qwen3.run(lambda engine: generate(engine, [free]))
    assert whole.finish_reason == "length"
    assert len(whole.token_ids) == free.max_tokens == len(whole.logprobs)
    stop = whole.token_ids[5]
    first = whole.token_ids.index(stop)
    stopped = request((5, 6, 7), temperature=0.0, stop_token_ids=(511, stop))
    (short,) = qwen3.run(lambda engine: generate(engine, [stopped]))
    assert short.finish_reason == "stop"
    assert short.token_ids == whole.token_ids[: first + 1]


def test_more_requests_than_the_engine_decodes_at_once_all_come_back(
    qwen3: RunningServer,
) -> None:
    asked = [request((9, 9, row + 3), row, max_tokens=4) for row in range(100)]
    assert len(qwen3.run(lambda engine: generate(engine, asked))) == 100


def test_dynamic_sampling_fills_a_step_and_repeats_it(qwen3: RunningServer) -> None:
    def grade(prompt: Prompt, response: Response) -> Reward:
        return Reward(accuracy=float(response.token_ids[0] % 2), score=0.0)

    class Source:
        def __init__(self) -> None:
            self.given = 0

        def take(self, count: int) -> list[Prompt]:
            first, self.given = self.given, self.given + count
            numbers = range(first, self.given)
            return [Prompt(str(n), "", (n % 300 + 3, 9), "1") for n in numbers]

        def put_back(self, count: int) -> None:
            self.given -= count

    async def collect(engine: VllmEngine) -> RolloutStep:
        scheduler = GroupScheduler(
            engine.generate,
            Source(),
            ThreadedGrader(grade, lambda ids: " ".join(map(str, ids))),
            RolloutConfig(prompts_per_step=5, group_size=4, max_response_tokens=8),
            SamplingConfig(prompts_per_round=2),
            interrupt=engine.interrupt,
            seed=3,
            stop_token_ids=[2],
            capacity=lambda: 64,
        )
        return await scheduler.collect(1, 0)

    step = qwen3.run(collect)
    assert len(step.groups) == 5
    assert all(group.mixed for group in step.groups)
    assert qwen3.run(collect).groups == step.groups
    responses = [response for group in step.groups for response in group.responses]
    assert len({response.seed for response in responses}) == 20
    assert step.metrics["response_length/max"] <= 8


def test_a_refused_request_is_an_engine_error_with_the_reason(qwen3: RunningServer) -> None:
    too_long = request((7,) * 513)
    with pytest.raises(EngineError, match=r"answered 400 .*512"):
        qwen3.run(lambda engine: generate(engine, [too_long]))


def test_listens_on_unix_sockets_and_loopback_only(qwen3: RunningServer) -> None:
    addresses = [
        connection.laddr.ip
        for process in processes(qwen3)
        for connection in process.net_connections("inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    ]
    assert set(addresses) <= {"127.0.0.1"}
    folder = Path(qwen3.server.endpoint.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_environment_has_no_launcher_words_and_no_unsafe_serialisation(
    qwen3: RunningServer,
) -> None:
    for process in processes(qwen3):
        environment = process.environ()
        assert not {"RANK", "MASTER_ADDR", "VLLM_ALLOW_INSECURE_SERIALIZATION"} & set(environment)


def test_update_brings_the_new_weights_and_their_version(qwen3: RunningServer) -> None:
    for seed in (11, 12):  # twice: the second starts from already converted weights
        qwen3.update(tiny_model("qwen3", seed=seed))
        asked = [request(prompt, row) for row, prompt in enumerate(prompts())]
        results = qwen3.run(lambda engine, asked=asked: generate(engine, asked))
        assert largest_gap(qwen3.model, asked, results) <= PARITY
        assert {result.policy_version for result in results} == {qwen3.version}


class WithoutReset(VllmEngine):
    async def release(self, policy_version: int) -> None:
        body = {"new_version": str(policy_version)}
        await self.http.send("POST", "/update_weight_version", body)
        await self.http.send("POST", "/resume")


@pytest.mark.parametrize("cure", [True, False])
def test_cached_prompts_of_old_weights_are_forgotten(qwen3: RunningServer, cure: bool) -> None:
    long_prompt = tuple(3 + (5 * column) % 400 for column in range(300))
    asked = [request(long_prompt, max_tokens=8)]
    qwen3.run(lambda engine: generate(engine, asked))
    model = tiny_model("qwen3", seed=21 + cure)
    qwen3.version += 1
    published = qwen3.publish(model, qwen3.version)

    async def update(_: VllmEngine) -> None:
        engine = (VllmEngine if cure else WithoutReset)(qwen3.server.endpoint)
        try:
            await published.install(engine)
        finally:
            await engine.close()

    qwen3.run(update)
    qwen3.model = model
    gap = largest_gap(model, asked, qwen3.run(lambda engine: generate(engine, asked)))
    assert (gap <= PARITY) if cure else (gap > 0.1)


@dataclass
class Overlap:
    """Requests that keep coming while weights change."""

    answers: list[tuple[GenerationRequest, GenerationResult]] = field(default_factory=list)
    models: dict[int, PreTrainedModel] = field(default_factory=dict)
    """By the version that they were served as."""
    megabytes: list[float] = field(default_factory=list)
    """Of all processes of the server, after each update."""


UPDATES = 50
CLIENTS = 6
LONG_RESPONSE = 48
LONGEST_PASS = CLIENTS * (LONG_RESPONSE + 2) + 1
"""Tokens of the longest forward pass. The CPU keeps a compiled kernel for each length, up to a
number: they are made before memory is watched."""
MOST_GROWTH_MB = 24


async def overlap(running: RunningServer, engine: VllmEngine) -> Overlap:
    """`UPDATES` updates, always with requests under way."""
    seen = Overlap(models={running.version: running.model})
    for length in range(1, LONGEST_PASS):
        await engine.generate(request((5,) * length, max_tokens=1))
    models = [tiny_model("qwen3", seed=41), tiny_model("qwen3", seed=42)]
    numbers = itertools.count()
    stop = asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            number = next(numbers)
            prompt = (number % 200 + 3, number // 200 + 3)
            asked = request(prompt, number, max_tokens=LONG_RESPONSE, stop_token_ids=())
            seen.answers.append((asked, await engine.generate(asked)))

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    for turn in range(UPDATES):
        running.version += 1
        running.model = seen.models[running.version] = models[turn % 2]
        published = running.publish(running.model, running.version)
        await published.install(engine)
        shutil.rmtree(str(published.payload["folder"]))
        done = len(seen.answers)
        while len(seen.answers) < done + CLIENTS // 2:
            await asyncio.sleep(0.002)
        seen.megabytes.append(sum(p.memory_info().rss for p in processes(running)) / 2**20)
    stop.set()
    await asyncio.gather(*clients)
    assert len(seen.answers) == next(numbers)
    return seen


@pytest.fixture(scope="module", params=["wait", "keep"])
def overlapped(qwen3: RunningServer, request: pytest.FixtureRequest) -> tuple[InFlight, Overlap]:
    def call(engine: VllmEngine) -> Coroutine[object, object, Overlap]:
        return overlap(qwen3, engine)

    return request.param, run_with_engine(qwen3.server.endpoint, call, in_flight=request.param)


def test_fifty_updates_lose_and_double_no_request_that_runs(
    overlapped: tuple[InFlight, Overlap],
) -> None:
    _, seen = overlapped
    assert {len(result.token_ids) for _, result in seen.answers} == {LONG_RESPONSE}
    identities = [asked.request_id for asked, _ in seen.answers]
    assert len(set(identities)) == len(identities) >= UPDATES * CLIENTS // 2


def test_every_token_of_a_response_comes_from_the_weights_that_it_names(
    overlapped: tuple[InFlight, Overlap],
) -> None:
    mode, seen = overlapped
    mixed = [result for _, result in seen.answers if len(result.version_spans) > 1]
    assert bool(mixed) == (mode == "keep")
    versions = {version for _, result in seen.answers for _, version in result.version_spans}
    assert len(versions) >= UPDATES
    for asked, result in seen.answers:
        found = torch.tensor(result.logprobs)
        starts = [start for start, _ in result.version_spans]
        assert starts[0] == 0
        assert result.policy_version == min(version for _, version in result.version_spans)
        for (start, version), end in zip(
            result.version_spans, [*starts[1:], LONG_RESPONSE], strict=True
        ):
            ids = asked.prompt_token_ids, result.token_ids
            expected = expected_logprobs(seen.models[version], *ids, asked.temperature)
            assert (found - expected)[start:end].abs().max() <= PARITY


def test_fifty_updates_leave_no_memory_behind(overlapped: tuple[InFlight, Overlap]) -> None:
    _, seen = overlapped
    early, late = seen.megabytes[10:20], seen.megabytes[-10:]
    assert max(late) <= max(early) + MOST_GROWTH_MB


async def _try_update(engine: VllmEngine, good: Published, wrong: Published) -> None:
    await good.install(engine)
    with pytest.raises(EngineError) as caught:
        await wrong.install(engine)
    with pytest.raises(EngineError, match="restart the engine"):
        await engine.generate(request((5, 6)))
    raise caught.value


@pytest.mark.parametrize("wrong", ["outside", "missing", "cut short", "of another version"])
def test_wrong_files_fail_the_update_and_the_engine_is_not_used_again(
    qwen3: RunningServer, wrong: str, tmp_path: Path
) -> None:
    """Last in this file: the server's weights are in no defined state afterwards."""
    number = qwen3.version = qwen3.version + 2
    good, published = (qwen3.publish(qwen3.model, version) for version in (number - 1, number))
    folder = Path(str(published.payload["folder"]))
    file = sorted(folder.iterdir())[-1]
    if wrong == "outside":
        shutil.copytree(folder, tmp_path / folder.name)
        payload = published.payload | {"folder": str(tmp_path / folder.name)}
        published = replace(published, payload=payload)
    elif wrong == "missing":
        file.unlink()
    elif wrong == "cut short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.write_bytes((Path(str(good.payload["folder"])) / file.name).read_bytes())
    with pytest.raises(EngineError, match="500"):
        qwen3.run(lambda engine: _try_update(engine, good, published))
