"""Planned updates of a run's own engine: proven, killed half-way, restarted, corrupted."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from megatron_dapo.config import load_config
from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.train_map import TrainLayout
from megatron_dapo.rollout.driver import RolloutDriver
from megatron_dapo.rollout.engine import EngineError
from megatron_dapo.rollout.member_sampler import EnginesLost
from megatron_dapo.rollout.vllm_server import session_members
from tests.e2e.conftest import PARITY, expected_logprobs, request, saved_tensors, stop_and_look
from tests.e2e.runs import make_start
from tests.e2e.vllm_models import init_info, plan_of, publish_messages
from tests.tiny_models import tiny_model

FAMILY = "qwen2_tied"
TRAIN = TrainLayout(tensor=2, pipeline=2, data=2, padded_vocab_size=640)


@dataclass
class Driven:
    """A driver with one engine, and what it needs for updates of it."""

    driver: RolloutDriver
    plan: ReshardPlan
    weights: Path
    version: int = 0

    @property
    def info(self) -> dict[str, object]:
        return init_info(self.plan, self.weights)

    def publish(self, model: PreTrainedModel) -> tuple[dict[str, object], list[dict[str, str]]]:
        """The next version: its payload, and the digests that the engine must have."""
        self.version += 1
        tensors = {name: tensor.float() for name, tensor in saved_tensors(model).items()}
        return publish_messages(self.plan, tensors, self.weights, self.version)

    def start(self, payload: dict[str, object]) -> None:
        self.driver.start_update({0: self.info}, payload, self.version)

    def served(self, model: PreTrainedModel) -> bool:
        """Every sampled token comes from this model under the current version."""
        step = self.driver.collect(self.version, self.version)
        gaps = []
        for group in step.generated:
            for response in group.responses:
                assert response.version_spans == ((0, self.version),)
                ids = group.prompt.token_ids, response.token_ids
                wanted = expected_logprobs(model, *ids, temperature=1.0)
                gaps.append((torch.tensor(response.rollout_logprobs) - wanted).abs().max())
        assert gaps
        return max(gaps) <= PARITY

    def engine_processes(self) -> list[int]:
        (server,) = self.driver._fleet._servers
        assert server.pid is not None
        return session_members(server.pid)


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    pytest.importorskip("vllm")
    start = make_start(tmp_path_factory.mktemp("restart"), FAMILY)
    config = load_config(start.file, ["sampling.dynamic=false"])
    driver = RolloutDriver(config, device="cpu")
    plan = plan_of(start.model, TRAIN, tensor=1, dtype="float32", bucket_bytes=200_000)
    try:
        driver.start()
        driver.wait_ready()
        with tempfile.TemporaryDirectory(prefix="megatron_dapo_test_", dir="/dev/shm") as weights:
            yield Driven(driver, plan, Path(weights))
    finally:
        for server in driver._fleet._servers:
            stop_and_look(server)
        driver.close()


def test_an_engine_without_weights_of_the_run_is_not_asked(driven: Driven) -> None:
    fleet = driven.driver._fleet
    with pytest.raises(EngineError, match="has no weights of this run yet"):
        fleet.run(fleet.engines[0].generate(request((5, 6))))


def test_an_update_is_proven_and_probed(driven: Driven) -> None:
    model = tiny_model(FAMILY, seed=61)
    payload, digests = driven.publish(model)
    driven.start(payload)
    (probe,) = driven.driver.finish_update(digests)
    driven.driver.let_requests_in()
    assert (probe.engine, probe.policy_version) == (0, driven.version)
    wanted = expected_logprobs(model, probe.prompt_token_ids, probe.response_token_ids, 1.0)
    assert (torch.tensor(probe.logprobs) - wanted).abs().max() <= PARITY
    ((report,),) = driven.driver.update_reports.values()
    assert report["version"] == driven.version
    assert report["bytes_received"] == driven.plan.bytes_by_receiver()[0]
    assert driven.served(model)


def test_an_engine_killed_inside_an_update_serves_nothing_until_it_has_the_current_weights(
    driven: Driven,
) -> None:
    model = tiny_model(FAMILY, seed=62)
    payload, digests = driven.publish(model)
    before = driven.engine_processes()
    driven.start(payload)
    time.sleep(0.01)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert driven.driver.finish_update(digests) == ()
    with pytest.raises(EnginesLost, match=r"rollout engine 0 .*is lost"):
        driven.driver.collect(driven.version, driven.version)
    assert driven.driver.to_update(all_engines=False) == {0: True}
    driven.start(payload)
    driven.driver.finish_update(digests)
    driven.driver.let_requests_in()
    assert not set(driven.engine_processes()) & set(before)
    assert driven.served(model)


def test_one_changed_byte_is_named_and_never_served(driven: Driven) -> None:
    """Last in this file: the engine is not usable afterwards."""
    payload, digests = driven.publish(tiny_model(FAMILY, seed=63))
    file = sorted(Path(str(payload["folder"])).iterdir())[-1]
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        byte = opened.read(1)[0]
        opened.seek(-3, os.SEEK_END)
        opened.write(bytes([byte ^ 1]))
    driven.start(payload)
    with pytest.raises(EngineError, match=r"engine 0 .*does not hold .*: model\.\S+ on rank 0 has"):
        driven.driver.finish_update(digests)
    with pytest.raises(EngineError, match="restart the engine"):
        driven.driver.collect(driven.version, driven.version)
