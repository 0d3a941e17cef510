"""Engines that are killed around an update, and whole runs whose update breaks.

An engine that comes back gets the current weights before it serves; a run that cannot prove its
weights stops with exit code 1, by itself, and leaves nothing behind.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from megatron_dapo.observability.run_files import read_metrics
from megatron_dapo.rollout.member_sampler import EnginesLost
from megatron_dapo.trainer import Trainer
from tests.e2e import sabotage
from tests.e2e.processes import RunningTrain, start_train
from tests.e2e.runs import Start, make_start
from tests.e2e.trainers import (
    Scene,
    change_weights,
    check_engine,
    export,
    opened_trainer,
    record_expected,
    run_trainers,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
GLOO = ("resharding.transport=gloo", "resharding.timeout_seconds=20")
RECEIVING = "while receiving"
MOMENTS = [
    "before /start_weight_update",
    RECEIVING,
    "before /finish_weight_update",
    "before /resume",
    "after /resume",
]
LONGEST_END_SECONDS = 60.0
RESPONSES_OF_A_STEP = 16


def kill_engines_at(moment: str) -> None:
    """All engines of this process are killed at that moment of the next update."""
    if moment == RECEIVING:
        sabotage.kill_while_receiving()
    else:
        when, path = moment.split(" ")
        sabotage.kill_at(when, path, time=1)


def update_through(trainer: Trainer, moment: str) -> None:
    """New weights for an engine that is killed on the way. Collective."""
    trainer.policy_version = sabotage.FIRST_TRAINED
    change_weights(trainer, 1.001)
    if trainer.parallel.rank == 0:
        with sabotage.mended():
            kill_engines_at(moment)
            trainer.sync_weights()
    else:
        trainer.sync_weights()


def die_and_return(rank: int, world: int, scene: Scene, transport: tuple[str, ...]) -> None:
    layout = ("parallel.pipeline=2", "resharding.probe_tokens=0", "rollout.max_restarts=9")
    with opened_trainer(rank, world, scene, *layout, *transport) as trainer:
        trainer.sync_weights()
        expected = record_expected(trainer)
        for restarts, moment in enumerate(moments(trainer.bridge.transport), start=1):
            update_through(trainer, moment)
            if moment == "after /resume":  # it is lost once the update is over
                lose_and_bring_back(trainer, restarts)
            current = trainer.config.run_dir / "current"
            export(trainer, current)
            if rank == 0:
                assert trainer.rollouts is not None
                (replica,) = trainer.rollouts._fleet._replicas
                assert replica.restarts == restarts, moment
                assert replica.server is not None
                check_engine(trainer, replica.server.endpoint, expected[-1], current, 1)
                step = trainer.rollouts.collect(restarts, trainer.policy_version)
                responses = [r for group in step.generated for r in group.responses]
                assert {r.version_spans for r in responses} == {((0, 1),)}


def moments(transport: str) -> list[str]:
    """Over files, receiving is over before the trainers have anything to do."""
    return [moment for moment in MOMENTS if (moment, transport) != (RECEIVING, "files")]


def lose_and_bring_back(trainer: Trainer, step: int) -> None:
    """As the trainer does once its sampling of `step` finds no engine left. Collective.

    Where the heartbeat was quick, the update has seen the loss, and mended it, itself.
    """
    if trainer.rollouts is not None:
        try:
            trainer.rollouts.collect(step, trainer.policy_version)
        except EnginesLost as error:
            assert "rollout engine 0" in str(error)
    trainer.weights.bring_back()


@pytest.mark.parametrize("transport", [GLOO, ()], ids=["gloo", "files"])
def test_a_killed_engine_comes_back_with_the_current_weights_only(
    transport: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    scene = Scene(make_start(tmp_path, "qwen2_tied"), tensor=1)
    run_trainers(2, die_and_return, scene, transport)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    pytest.importorskip("vllm")
    return make_start(tmp_path_factory.mktemp("broken"), "qwen2_tied")


def wait_for_the_end(run: RunningTrain) -> float:
    """Until the run has ended by itself; seconds since its batch was complete."""
    complete = None
    while run.process.poll() is None:
        run.note_files()
        time.sleep(0.2)
        if complete is None and run.responses_graded() >= RESPONSES_OF_A_STEP:
            complete = time.monotonic()
        assert complete is None or time.monotonic() - complete < 4 * LONGEST_END_SECONDS
    assert complete is not None, "ended before a batch was complete"
    return time.monotonic() - complete


@pytest.mark.parametrize(
    ("fault", "transport", "words"),
    [
        ("flip a bit", (), r"rollout engine 0 .*does not hold .*: model\.\S+ on rank 0 has"),
        ("lose a file", (), r"bucket \d+ of trainer rank 1 is missing: there is no from_1_to_0"),
    ],
)
def test_a_run_whose_update_breaks_stops_and_leaves_nothing(
    start: Start, tmp_path: Path, fault: str, transport: tuple[str, ...], words: str
) -> None:
    settings = ("parallel.pipeline=2", "sampling.dynamic=false", *transport)
    name = re.sub(r"\W", "_", fault)
    environment = sabotage.sabotaged(fault, tmp_path / "first")
    run = start_train(start, name, *settings, environment=environment)
    try:
        seconds = wait_for_the_end(run)
        assert run.process.returncode == 1
        run.wait_until_gone()
        output = run.output()
    finally:
        run.close()
    assert re.search(words, output), output
    assert seconds < LONGEST_END_SECONDS
    assert run.responses_graded() == RESPONSES_OF_A_STEP  # of proven weights, and none after
    assert not (run.folder / "hf").exists()


@pytest.mark.parametrize(
    ("fault", "transport"),
    [
        ("kill before /start_weight_update", ()),
        ("kill while receiving", GLOO),
        ("kill before /finish_weight_update", ()),
        ("kill before /resume", ()),
        ("kill after /resume", ()),
    ],
)
def test_a_run_whose_engine_dies_inside_an_update_ends_with_all_its_steps(
    start: Start, tmp_path: Path, fault: str, transport: tuple[str, ...]
) -> None:
    settings = ("parallel.pipeline=2", "sampling.dynamic=false", *transport)
    name = "goes_on_" + re.sub(r"\W", "_", fault)
    environment = sabotage.sabotaged(fault, tmp_path / "first")
    run = start_train(start, name, *settings, environment=environment)
    try:
        run.finish()
    finally:
        run.close()
    metrics = read_metrics(run.metrics_file)
    assert [metrics[step]["training/policy_version"] for step in (1, 2)] == [1, 2]
    assert sum(record["engine/restarts"] for record in metrics.values()) == 1
    assert run.responses_graded() == 2 * RESPONSES_OF_A_STEP
