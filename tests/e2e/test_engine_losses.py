"""Engines that are killed or stopped at every moment of a step: the run goes on with all samples.

Each of a step's samples is trained on exactly once, and from the weights of its step.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from megatron_dapo.observability.run_files import read_metrics
from megatron_dapo.rollout.generate_route import GENERATE
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.rollout.vllm_server import session_members
from megatron_dapo.trainer import Trainer
from tests.e2e import sabotage
from tests.e2e.processes import RunningTrain, start_train
from tests.e2e.runs import make_start
from tests.e2e.test_signals import phase_of
from tests.e2e.trainers import Scene, opened_trainer, run_trainers

PATIENCE_SECONDS = 1200
PROMPTS, GROUP = 4, 4
SAMPLES = PROMPTS * GROUP
HEARTBEAT = ("rollout.heartbeat_seconds=2", "rollout.heartbeat_timeout_seconds=30")
LONG = ("rollout.max_response_tokens=200", "training.tokens_per_micro_batch=256")
FEW_AT_ONCE = ("rollout.max_concurrent_sequences=3",)
"""With responses that end at different lengths: some are being decoded at any moment."""
SETTINGS = (
    *HEARTBEAT,
    *LONG,
    *FEW_AT_ONCE,
    "resharding.timeout_seconds=60",
    "training.steps=20",
)
PHASES = {
    "during the pause": ("before", "/start_weight_update", 1),
    "while weights are loaded": ("before", "/update_weights", 1),
    "while they are verified": ("before", "/collective_rpc", 1),
    "after release, before requests are let in": ("after", "/resume", 1),
    "while prompts are prefilled": ("before", GENERATE, 2),
    "in the middle of decoding": ("after", GENERATE, SAMPLES // 2),
    "at the last response": ("after", GENERATE, SAMPLES - 1),
}
"""When an engine dies: before or after the n-th exchange of a kind."""
UNFINISHED = ("in the middle of decoding", "at the last response")
"""Moments at which an engine is lost that still decodes."""
MOMENTS = ["before the step", *PHASES, "twice in one step", "between steps"]


@dataclass
class Victims:
    """Kills or stops the first engine of this process, once for each entry of `left`."""

    trainer: Trainer
    number: signal.Signals
    left: list[tuple[str, str, int]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    """Requests for a response that were under way when an engine was last lost in one."""

    def strike(self) -> None:
        assert self.trainer.rollouts is not None
        server = self.trainer.rollouts._fleet._servers[0]
        for pid in [] if server.pid is None else session_members(server.pid):
            os.kill(pid, self.number)

    def look(self, when: str, path: str) -> None:
        self.seen[f"{when} {path}"] += 1
        if self.left and self._due(*self.left[0], when, path):
            self.left.pop(0)
            self.unanswered = self.seen[f"before {GENERATE}"] - self.seen[f"after {GENERATE}"]
            self.seen.clear()
            self.strike()

    def _due(self, when: str, path: str, time: int, *now: str) -> bool:
        return (when, path) == now and self.seen[f"{when} {path}"] >= time


def check_samples(step: RolloutStep, version: int) -> None:
    """Each sample is there once, from the weights of its step."""
    assert len(step.groups) == PROMPTS
    assert len({group.prompt.id for group in step.groups}) == PROMPTS
    responses = [response for group in step.groups for response in group.responses]
    names = Counter((r.prompt_id, r.sample_index) for r in responses)
    assert len(names) == SAMPLES and set(names.values()) == {1}
    assert len({response.seed for response in responses}) == SAMPLES
    assert {response.version_spans for response in responses} == {((0, version),)}
    assert {response.finish_reason for response in responses} <= {"stop", "length"}


def lose_engines(
    rank: int, world: int, scene: Scene, engines: int, number: int, moments: list[str]
) -> None:
    settings = (*SETTINGS, f"rollout.engines={engines}")
    with opened_trainer(rank, world, scene, *settings) as trainer:
        assert trainer.rollouts is not None
        fleet, collect = trainer.rollouts._fleet, trainer.rollouts.collect
        victims = Victims(trainer, signal.Signals(number))
        collected: list[RolloutStep] = []

        def keep(step: int, version: int) -> RolloutStep:
            collected.append(collect(step, version))
            return collected[-1]

        trainer.rollouts.collect = keep  # type: ignore[assignment,method-assign]
        trainer.sync_weights()
        for step, moment in enumerate(moments, start=1):
            restarts = sum(replica.restarts for replica in fleet._replicas)
            victims.left = [PHASES[moment]] if moment in PHASES else []
            victims.seen.clear()
            victims.unanswered = 0
            if moment == "twice in one step":
                victims.left = [("before", GENERATE, 2), ("before", GENERATE, 2)]
            if moment in ("before the step", "between steps"):
                victims.strike()
            with sabotage.mended():
                sabotage.look_at_exchanges(victims.look)
                assert trainer.step(step), moment
            assert len(collected) == step, moment
            check_samples(collected[-1], step - 1)
            if engines == 1 or moment in ("during the pause", "while weights are loaded"):
                assert victims.left == [], moment
            assert moment not in UNFINISHED or victims.unanswered > 0, moment
            wait_for_engines(trainer, restarts)
            for replica in fleet._replicas:
                replica._budget.spent = 0


def wait_for_engines(trainer: Trainer, restarts: int) -> None:
    """Every loss is followed by a restart; the fresh engine serves the current version, too."""
    assert trainer.rollouts is not None
    replicas = trainer.rollouts._fleet._replicas
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(replica.engine.usable for replica in replicas):
        assert time.monotonic() < deadline, "an engine does not come back"
        time.sleep(0.2)
    trainer.weights.sync(trainer.policy_version)
    assert sum(replica.restarts for replica in replicas) > restarts
    assert all(engine.usable for engine in trainer.rollouts._fleet.engines)
    versions = [trainer.rollouts._fleet.run(r.engine.weight_version()) for r in replicas]
    assert set(versions) == {trainer.policy_version}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("engines", [1, 2])
def test_a_step_is_whole_whenever_an_engine_is_lost(
    tmp_path: Path, engines: int, number: signal.Signals
) -> None:
    pytest.importorskip("vllm")
    scene = Scene(make_start(tmp_path, "qwen2_tied"), tensor=1)
    run_trainers(1, lose_engines, scene, engines, int(number), MOMENTS)


IN_STEP_2 = f"kill after {GENERATE} {SAMPLES + 4}"
"""Beside the samples of step 1, two answers are those of probes, and two of step 2."""


def guardian(run: RunningTrain, index: int) -> psutil.Process:
    found = [
        process
        for process in run.processes()
        if any(word.endswith("server_main.py") for word in process.cmdline())
        and any(f"rollout_engine_{index}.log" in opened for opened in open_files(process))
    ]
    (process,) = found
    return process


def open_files(process: psutil.Process) -> list[str]:
    return [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (1, 2)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("engines", "number"),
    [
        (1, signal.SIGKILL),
        pytest.param(2, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_engine_is_lost_inside_a_step_ends_with_all_its_steps(
    tmp_path: Path, engines: int, number: signal.Signals
) -> None:
    pytest.importorskip("vllm")
    longer = ("rollout.max_response_tokens=400", "training.tokens_per_micro_batch=448")
    settings = (*longer, "sampling.dynamic=false", "training.steps=3", f"rollout.engines={engines}")
    environment = sabotage.sabotaged(IN_STEP_2, tmp_path / "fault") if engines == 1 else {}
    run = start_train(
        make_start(tmp_path, "qwen2_tied"), "lost", *settings, *HEARTBEAT, environment=environment
    )
    try:
        run.wait_for("a response", lambda: run.responses_graded() > 0)
        run.note_files()
        if engines > 1:
            session = guardian(run, 0).pid
            run.wait_for("step 2", lambda: phase_of(run.folder) == "gen 2")
            for pid in session_members(session):
                os.kill(pid, number)
        output = run.finish()
    finally:
        run.close()
    metrics = read_metrics(run.metrics_file)
    assert list(metrics) == [1, 2, 3]
    assert [metrics[step]["training/policy_version"] for step in metrics] == [1, 2, 3]
    assert [metrics[step]["filter/kept"] for step in metrics] == [PROMPTS] * 3
    assert sum(metrics[step]["engine/lost_requests"] for step in metrics) > 0
    assert "rollout engine 0" in output and "is lost" in output
    if engines == 1:
        assert sum(metrics[step]["engine/restarts"] for step in metrics) == 1
    assert run.responses_graded() == 3 * SAMPLES  # none is graded twice
