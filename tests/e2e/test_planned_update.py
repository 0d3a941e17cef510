"""Planned updates of real servers: what the digests prove, the log-probs show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.train_map import TrainLayout
from megatron_dapo.rollout.engine import EngineError
from megatron_dapo.rollout.vllm_engine import VllmEngine
from tests.e2e.conftest import (
    PARITY,
    RunningServer,
    generate,
    largest_gap,
    prompts,
    request,
    running_server,
)
from tests.e2e.vllm_models import init_info, plan_of, publish_messages, tensors_of
from tests.tiny_models import save_tiny_model

DENSE = TrainLayout(tensor=2, pipeline=2, data=2, padded_vocab_size=640)
MOE = TrainLayout(tensor=2, pipeline=2, data=2, expert=2, expert_tensor=1, padded_vocab_size=512)
SERVERS = [
    pytest.param(("qwen2_tied", 1, DENSE), id="tied"),
    pytest.param(("qwen3_moe", 2, MOE), id="moe-tp2"),
    pytest.param(("qwen2", 1, DENSE), id="biases", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SERVERS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, ReshardPlan]]:
    family, tensor, train = request.param
    with running_server(tmp_path_factory, family, tensor=tensor) as running:
        plan = plan_of(
            running.server.options.model,
            train,
            tensor=tensor,
            dtype="float32",
            bucket_bytes=300_000,
        )
        yield running, plan


def bring(running: RunningServer, plan: ReshardPlan, folder: Path, seed: int) -> None:
    """A planned update to a new random model, digests compared."""
    running.version += 1
    model = save_tiny_model(folder / "new", running.family, seed=seed)
    payload, digests = publish_messages(
        plan, tensors_of(folder / "new"), running.weights_directory, running.version
    )

    async def update(engine: VllmEngine) -> list[dict[str, object]]:
        info = init_info(plan, running.weights_directory)
        return await engine.update(info, payload, running.version, digests)

    reports = running.run(update)
    running.model = model
    assert len(reports) == plan.engine.tensor
    for rank, report in enumerate(reports):
        assert report["plan"] == plan.fingerprint and report["version"] == running.version
        assert report["bytes_received"] == plan.bytes_by_receiver()[rank]
        assert report["live"] and report["rebuilt"] and not report["loader"]


def test_updates_bring_the_new_weights(
    case: tuple[RunningServer, ReshardPlan], tmp_path: Path
) -> None:
    running, plan = case
    asked = [request(prompt, row) for row, prompt in enumerate(prompts())]
    for seed in (51, 52):  # twice: the second starts from already converted weights
        bring(running, plan, tmp_path / str(seed), seed)
        results = running.run(lambda engine: generate(engine, asked))
        assert largest_gap(running.model, asked, results) <= PARITY
        assert {result.policy_version for result in results} == {running.version}


def test_a_file_with_the_whole_model_may_follow_a_plan(
    case: tuple[RunningServer, ReshardPlan], tmp_path: Path
) -> None:
    running, _ = case
    running.update(save_tiny_model(tmp_path / "file", running.family, seed=53))
    asked = [request(prompt, row) for row, prompt in enumerate(prompts())]
    results = running.run(lambda engine: generate(engine, asked))
    assert largest_gap(running.model, asked, results) <= PARITY


def test_wrong_digests_and_damaged_files_fail_the_update(
    case: tuple[RunningServer, ReshardPlan], tmp_path: Path
) -> None:
    """Last: the engines are paused for good, with weights that nobody asked for."""
    running, plan = case
    save_tiny_model(tmp_path / "new", running.family, seed=54)
    tensors, weights = tensors_of(tmp_path / "new"), running.weights_directory
    info = init_info(plan, weights)
    name = "model.layers.1.self_attn.qkv_proj.weight"

    async def update(engine: VllmEngine) -> None:
        await engine.update(info, payload, 101, digests)

    payload, digests = publish_messages(plan, tensors, weights, 101)
    digests[-1][name] = "0" * 16
    with pytest.raises(EngineError, match=rf"{name} on rank {plan.engine.tensor - 1}"):
        running.run(update)
    payload, digests = publish_messages(plan, tensors, weights, 102)
    damaged = sorted((weights / "policy_102").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(EngineError, match="answered 500"):
        running.run(update)
    with pytest.raises(EngineError, match="answered 500"):
        running.run(lambda engine: engine._http.send("POST", "/finish_weight_update", {}))
