"""Real vLLM servers on CPU with tiny models. A start costs 20-50 s: few servers, many checks.

Training runs are shared by all files too: see `training_runs` and `shared_engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch
from pydantic import JsonValue
from transformers import PreTrainedModel

from megatron_dapo.config import load_config
from megatron_dapo.config.versions import is_installed
from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.train_map import TrainLayout
from megatron_dapo.rollout.engine import GenerationRequest, GenerationResult
from megatron_dapo.rollout.server_options import ServerOptions, server_options
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.vllm_server import VllmServer, session_members
from megatron_dapo.rollout.weight_update import InFlight
from tests.e2e.runs import Run, Start, make_start, train
from tests.e2e.vllm_models import init_info, plan_of, publish_messages
from tests.tiny_models import save_tiny_model, tiny_model

ResultT = TypeVar("ResultT")
PARITY = 1e-4
GREEDY_TOKENS = 32
DENSE = TrainLayout(tensor=2, pipeline=2, data=2, padded_vocab_size=640)
MOE = TrainLayout(tensor=2, pipeline=2, data=2, expert=2, expert_tensor=1, padded_vocab_size=512)
PPO = (
    *("advantage.estimator=gae", "sampling.dynamic=false"),
    *("rollout.prompts_per_step=16", "rollout.group_size=1"),
)
EVALUATED = ("evaluation.every=2", "evaluation.max_prompts=40")
LOGGERS = tuple(name for name in ("wandb", "tensorboard") if is_installed(name))
LOGGED = tuple(f"logging.{name}=true" for name in LOGGERS)
TRAINING_RUNS = {
    "qwen2_tied pp2": ("parallel.pipeline=2",),
    "qwen2_tied pp2 straight": ("parallel.pipeline=2", "training.steps=3"),
    "qwen2_tied tp2 pp2": ("parallel.tensor=2", "parallel.pipeline=2"),
    "qwen2_tied vpp2": ("parallel.pipeline=2", "parallel.virtual_pipeline=2"),
    "qwen2_tied cp2 kl": ("parallel.context=2", "loss.kl_coef=0.01"),
    "qwen2_tied tp2 ppo": ("parallel.tensor=2", *PPO),
    "qwen3_moe ep2 dp2": ("parallel.data=2", "parallel.expert=2", *EVALUATED, *LOGGED),
    "qwen3_moe tp2": ("parallel.tensor=2",),
    "qwen3 tp2": ("parallel.tensor=2",),
    "qwen2 dp2": ("parallel.data=2",),
    "qwen3 dp2 bf16": ("parallel.data=2", "model.dtype=bfloat16"),
}
"""By family and layout; each runs once a session, and only when a test asks for it."""
ON_THE_SHARED_ENGINE = {
    name for name in TRAINING_RUNS if name.startswith("qwen2_tied") and name != "qwen2_tied pp2"
}
"""The others start an engine of their own."""


@dataclass(frozen=True)
class Published:
    """A version that waits for an engine in a folder, as the trainer ranks publish it."""

    version: int
    info: dict[str, object]
    payload: dict[str, object]
    digests: list[dict[str, str]]

    async def install(self, engine: VllmEngine) -> list[dict[str, JsonValue]]:
        """Bring it into an engine, digests compared; the report of each tensor rank."""
        return await engine.update(self.info, self.payload, self.version, self.digests)


@dataclass
class RunningServer:
    """A server, the folder it started from, and the model that it should serve right now."""

    server: VllmServer
    family: str
    weights_directory: Path
    model: PreTrainedModel
    plan: ReshardPlan
    version: int = 0

    def run(self, call: Callable[[VllmEngine], Awaitable[ResultT]]) -> ResultT:
        return run_with_engine(self.server.endpoint, call)

    def publish(self, model: PreTrainedModel, version: int) -> Published:
        return publish(model, self.plan, self.weights_directory, version)

    def update(self, model: PreTrainedModel) -> list[dict[str, JsonValue]]:
        """Bring `model` into the engine under the next version."""
        self.version += 1
        reports = self.run(self.publish(model, self.version).install)
        self.model = model
        return reports


def run_with_engine(
    endpoint: str,
    call: Callable[[VllmEngine], Awaitable[ResultT]],
    *,
    in_flight: InFlight = "wait",
) -> ResultT:
    """`call` with a fresh client in an event loop of its own; it takes the engine as it is."""

    async def body() -> ResultT:
        engine = VllmEngine(endpoint, request_timeout_seconds=120, in_flight=in_flight)
        try:
            await engine.adopt()
            return await call(engine)
        finally:
            await engine.close()

    return asyncio.run(body())


def publish(model: PreTrainedModel, plan: ReshardPlan, directory: Path, version: int) -> Published:
    """Write the model's messages as the trainer ranks do.

    Expert tensors get their names and shapes from the Hugging Face folder's own writer.
    """
    tensors = {name: tensor.float() for name, tensor in saved_tensors(model).items()}
    payload, digests = publish_messages(plan, tensors, directory, version)
    return Published(version, init_info(plan, directory), payload, digests)


def tiny_plan(folder: Path, family: str, *, tensor: int = 1) -> ReshardPlan:
    """From eight trainer ranks to an engine with a tiny model."""
    train = MOE if family == "qwen3_moe" else DENSE
    return plan_of(folder, train, tensor=tensor, dtype="float32", bucket_bytes=300_000)


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def request(prompt: tuple[int, ...], index: int = 0, **changes: object) -> GenerationRequest:
    base = GenerationRequest(
        prompt_token_ids=prompt,
        seed=1000 + index,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=24,
        stop_token_ids=(2,),
        request_id=f"test-{index}",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def prompts(count: int = 8) -> list[tuple[int, ...]]:
    return [
        tuple(3 + (7 * row + 11 * column) % 500 for column in range(4 + row))
        for row in range(count)
    ]


async def generate(engine: VllmEngine, requests: list[GenerationRequest]) -> list[GenerationResult]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


def expected_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float
) -> torch.Tensor:
    """Log-probs of the response's tokens by transformers, fp32, [tokens]."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def largest_gap(
    model: PreTrainedModel,
    requests: list[GenerationRequest],
    results: list[GenerationResult],
    temperature: float | None = None,
) -> float:
    """Largest difference of a log-prob between engine and transformers."""
    return max(
        (
            torch.tensor(result.logprobs)
            - expected_logprobs(
                model,
                asked.prompt_token_ids,
                result.token_ids,
                asked.temperature if temperature is None else temperature,
            )
        )
        .abs()
        .max()
        .item()
        for asked, result in zip(requests, results, strict=True)
    )


def tiny_options(model: Path, log_file: Path, **changes: object) -> ServerOptions:
    base = ServerOptions(
        model=model,
        index=0,
        seed=0,
        device="cpu",
        tensor=1,
        dtype="float32",
        logprobs="processed",
        max_model_tokens=512,
        max_sequences=32,
        memory_fraction=0.1,
        cpu_kv_cache_gib=1,
        trust_remote_code=False,
        sleep_mode=False,
        startup_timeout_seconds=600,
        log_file=log_file,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@contextlib.contextmanager
def running_server(
    tmp_path_factory: pytest.TempPathFactory, family: str, **changes: object
) -> Iterator[RunningServer]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp(family)
    save_tiny_model(folder / "model", family)
    with tempfile.TemporaryDirectory(prefix="megatron_dapo_test_", dir="/dev/shm") as weights:
        options = tiny_options(folder / "model", folder / "engine.log", **changes)
        server = VllmServer(options)
        server.start()
        try:
            server.wait_ready()
            plan = tiny_plan(folder / "model", family, tensor=options.tensor)
            yield RunningServer(server, family, Path(weights), tiny_model(family), plan)
        finally:
            stop_and_look(server)


def stop_and_look(server: VllmServer) -> None:
    """Stop a server; nothing of it may be left."""
    if server.pid is None:
        return
    session, scratch = server.pid, Path(server.endpoint.removeprefix("unix:")).parent
    shared = mapped_shared_memory(session)
    server.stop()
    assert session_members(session) == []
    assert not scratch.exists()
    assert [path for path in shared if path.exists()] == []


def mapped_shared_memory(session: int) -> set[Path]:
    """Files right under /dev/shm that any process of the session maps."""
    maps = (
        Path(entry.path)
        for pid in session_members(session)
        for entry in psutil.Process(pid).memory_maps()
    )
    return {path for path in maps if path.parent == Path("/dev/shm") and path.exists()}


@dataclass(frozen=True)
class SharedEngine:
    """A server that outlives runs. It started from the folder that "qwen2_tied pp2" exported."""

    endpoint: str
    answers: list[tuple[int, ...]]
    """Its greedy continuations of `greedy_prompts`, before any run used it."""

    @property
    def override(self) -> str:
        """Makes a run of a qwen2_tied model use it."""
        return f"rollout.endpoints=[{self.endpoint}]"


class TrainingRuns:
    """Finished runs by name, started when they are first asked for."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        self._folder = folder
        self._request = request
        self._starts: dict[str, Start] = {}
        self._runs: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if name not in self._runs:
            overrides = [*TRAINING_RUNS[name]]
            if name in ON_THE_SHARED_ENGINE:
                overrides.append(self._request.getfixturevalue("shared_engine").override)
            start = self._start_of(name.split()[0])
            self._runs[name] = train(start, name.replace(" ", "_"), *overrides)
        return self._runs[name]

    def _start_of(self, family: str) -> Start:
        if family not in self._starts:
            self._starts[family] = make_start(self._folder / family, family)
        return self._starts[family]


@pytest.fixture(scope="session")
def training_runs(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> TrainingRuns:
    pytest.importorskip("vllm")
    return TrainingRuns(tmp_path_factory.mktemp("runs"), request)


@pytest.fixture(scope="session")
def shared_engine(training_runs: TrainingRuns) -> Iterator[SharedEngine]:
    exported = training_runs["qwen2_tied pp2"]
    config = load_config(
        exported.start.file,
        [f"run_dir={exported.folder.parent / 'shared'}", "rollout.max_engine_tokens=64"],
    )
    options = server_options(config, 0, device="cpu")
    server = VllmServer(replace(options, model=exported.hf))
    server.start()
    try:
        server.wait_ready()
        greedy = [
            request(prompt, row, temperature=0.0, max_tokens=GREEDY_TOKENS, stop_token_ids=())
            for row, prompt in enumerate(greedy_prompts())
        ]
        results = run_with_engine(server.endpoint, lambda engine: generate(engine, greedy))
        yield SharedEngine(server.endpoint, [result.token_ids for result in results])
    finally:
        stop_and_look(server)


def greedy_prompts() -> list[tuple[int, ...]]:
    """Within what a run's engine takes beside `GREEDY_TOKENS` new tokens."""
    return [prompt[:8] for prompt in prompts(20)]
