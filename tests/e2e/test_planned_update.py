"""Planned updates of real servers: what the digests prove, the log-probs show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.rollout.engine import EngineError
from tests.e2e.conftest import (
    PARITY,
    RunningServer,
    generate,
    largest_gap,
    prompts,
    request,
    running_server,
)
from tests.tiny_models import tiny_model

SERVERS = [
    pytest.param(("qwen2_tied", 1), id="tied"),
    pytest.param(("qwen3_moe", 2), id="moe-tp2"),
    pytest.param(("qwen2", 1), id="biases", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SERVERS)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    family, tensor = request.param
    with running_server(tmp_path_factory, family, tensor=tensor) as server:
        yield server


def test_updates_bring_the_new_weights(running: RunningServer) -> None:
    plan = running.plan
    asked = [request(prompt, row) for row, prompt in enumerate(prompts())]
    for seed in (51, 52):  # twice: the second starts from already converted weights
        reports = running.update(tiny_model(running.family, seed=seed))
        assert len(reports) == plan.engine.tensor
        for rank, report in enumerate(reports):
            assert report["plan"] == plan.fingerprint and report["version"] == running.version
            assert report["bytes_received"] == plan.bytes_by_receiver()[rank]
            assert report["live"] and report["rebuilt"] and not report["loader"]
        results = running.run(lambda engine: generate(engine, asked))
        assert largest_gap(running.model, asked, results) <= PARITY
        assert {result.policy_version for result in results} == {running.version}


def test_wrong_digests_and_damaged_files_fail_the_update(running: RunningServer) -> None:
    """Last: the engines are paused for good, with weights that nobody asked for."""
    model = tiny_model(running.family, seed=54)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    published = running.publish(model, 101)
    published.digests[-1][name] = "0" * 16
    last = running.plan.engine.tensor - 1
    with pytest.raises(EngineError, match=rf"{name} on rank {last}"):
        running.run(published.install)
    published = running.publish(model, 102)
    damaged = sorted(Path(str(published.payload["folder"])).iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(EngineError, match="answered 500"):
        running.run(published.install)
    with pytest.raises(EngineError, match="answered 500"):
        running.run(lambda engine: engine.http.send("POST", "/finish_weight_update", {}))
