"""A run that is stopped or killed and started again is the run that was never interrupted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.processes import start_train
from tests.e2e.runs import Run, Start, command, make_start, train
from tests.e2e.trainers import Scene, running_engines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS, HALF = 20, 10
"""Of 40 prompts 4 make a step, and more are sampled: epochs end on both sides of the middle."""
KILLS = 30
CLOCKS = ("timing_s/", "perf/", "weight_sync/")
ENGINES_NUMBERS = ("rollout/", "training/mismatch", "training/rollout", "filter/")
"""Hold the engine's log-probs, which move in the last bits with what is decoded beside."""


@dataclass(frozen=True)
class Stage:
    """A start and the engines that its runs use one after the other."""

    start: Start
    scene: Scene

    def overrides(self, *more: str) -> tuple[str, ...]:
        listed = ",".join(self.scene.endpoints)
        engines = (f"rollout.endpoints=[{listed}]", f"training.steps={STEPS}")
        return (*engines, "checkpoint.every=2", "checkpoint.asynchronous=true", *more)

    def train(self, name: str, *more: str) -> Run:
        return train(self.start, name, *self.overrides(*more))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    pytest.importorskip("vllm")
    start = make_start(tmp_path_factory.mktemp("resume"), "qwen2_tied")
    with running_engines(start, tensor=1) as scene:
        yield Stage(start, scene)


@pytest.fixture(scope="module")
def straight(stage: Stage) -> Run:
    return stage.train("straight")


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.hf / "model.safetensors")


def assert_same_weights(run: Run, other: Run) -> None:
    there, here = weights(other), weights(run)
    assert [name for name in there if not torch.equal(there[name], here[name])] == []


def exact(metrics: Mapping[str, float]) -> dict[str, float]:
    left_out = CLOCKS + ENGINES_NUMBERS
    return {name: value for name, value in metrics.items() if not name.startswith(left_out)}


def test_ten_steps_and_ten_more_are_twenty_to_the_last_bit(stage: Stage, straight: Run) -> None:
    stage.train("halves", f"training.steps={HALF}")
    resumed = stage.train("halves")
    assert f"step_{HALF:08d}" in resumed.finished.output
    assert list(resumed.metrics) == list(straight.metrics) == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        here, there = exact(resumed.metrics[step]), exact(straight.metrics[step])
        assert len(here) >= 20
        assert here == there, step
    assert straight.metrics[HALF]["data/epoch"] < straight.metrics[STEPS]["data/epoch"]
    assert_same_weights(resumed, straight)


def test_another_seed_is_refused_before_anything_starts(stage: Stage, straight: Run) -> None:
    logs = {path: path.stat().st_mtime_ns for path in (straight.folder / "logs").iterdir()}
    refused = command(
        "train",
        stage.start.file,
        f"run_dir={straight.folder}",
        *stage.overrides("seed=5", f"training.steps={STEPS + 1}"),
    )
    assert refused.code == 78
    assert "seed=5: " in refused.output and "was trained with 0" in refused.output
    graders = [path for path in logs if path.name.startswith(("grader", "rollout_engine"))]
    assert all(path.stat().st_mtime_ns == logs[path] for path in graders)


@pytest.mark.faults
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights(
    stage: Stage, straight: Run
) -> None:
    chance = random.Random(7)
    folder: Path | None = None
    for _ in range(KILLS):
        run = start_train(stage.start, "killed", *stage.overrides())
        folder = run.folder
        time.sleep(chance.uniform(0.2, straight.finished.seconds))
        run.process.kill()
        run.process.wait()
        run.close()
    resumed = stage.train("killed")
    assert folder is not None
    assert list(resumed.metrics) == list(range(1, STEPS + 1))
    assert_same_weights(resumed, straight)
    left = [path.name for path in (folder / "checkpoints").iterdir() if path.name[0] == "."]
    assert left == []


def test_responses_that_were_complete_before_a_kill_are_not_sampled_again(
    stage: Stage, straight: Run
) -> None:
    def kill_once(what: str, done: Callable[[Path], bool]) -> Path:
        run = start_train(stage.start, "mid", *stage.overrides("checkpoint.every=0"))
        try:
            run.wait_for(what, lambda: done(run.folder / "rollouts"))
            run.process.kill()
            run.wait_until_gone()
        finally:
            run.close()
        return run.folder

    def lines(rollouts: Path) -> list[bytes]:
        path = rollouts / "version_00000000.jsonl"
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []

    folder = kill_once("four responses", lambda rollouts: len(lines(rollouts)) > 4)
    before = [line for line in lines(folder / "rollouts") if line.endswith(b"\n")]
    kill_once("step 3", lambda rollouts: (rollouts / "version_00000002.jsonl").exists())
    after = lines(folder / "rollouts")
    assert after[: len(before)] == before
    requests = [line.split(b" ")[1] for line in after[1:]]
    assert len(set(requests)) == len(requests)
    resumed = stage.train("mid", "checkpoint.every=0")
    assert "responses of version 1 are in" in resumed.finished.output
    assert_same_weights(resumed, straight)
    assert list((folder / "rollouts").iterdir()) == []
