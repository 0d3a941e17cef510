"""Ctrl-C, SIGTERM and kill -9 at bad moments: the exit code, and that nothing is left behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_dapo.observability.run_files import read_metrics
from tests.e2e.processes import RunningTrain, start_train
from tests.e2e.runs import Start, make_start, train

pytestmark = pytest.mark.timeout(900)
LONGEST_EXIT_SECONDS = 30.0
LAYOUT = ("parallel.tensor=2", "sampling.dynamic=false")
LONG_GENERATION = (
    "rollout.prompts_per_step=64",
    "rollout.max_response_tokens=400",
    "rollout.max_concurrent_sequences=8",
    "training.tokens_per_micro_batch=512",
)
LONG_TRAINING = ("training.epochs=5000",)
MANY_STEPS = ("training.steps=5000",)
EXTRA = {
    "generation": LONG_GENERATION,
    "training": LONG_TRAINING,
    "a step is done": MANY_STEPS,
}
RESPONSES_PER_STEP = 16

Starter = Callable[..., RunningTrain]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    pytest.importorskip("vllm")
    return make_start(tmp_path_factory.mktemp("interrupted"), "qwen3")


@pytest.fixture
def runs(start: Start, request: pytest.FixtureRequest) -> Iterator[Starter]:
    """Starts a run and brings it to a moment; its processes are listed by then."""
    started: list[RunningTrain] = []

    def reach(moment: str) -> RunningTrain:
        extra = EXTRA.get(moment, ())
        name = request.node.name.replace(" ", "_")
        run = start_train(start, name, *LAYOUT, *extra)
        started.append(run)
        if moment == "engine launch":
            run.wait_for("the engine's log", run.engine_log.exists)
        elif moment == "engine start":
            run.wait_for("the engine's first words", lambda: _size(run.engine_log) > 0)
        elif moment == "a step is done":
            run.wait_for("its metrics", lambda: _size(run.metrics_file) > 0)
        elif moment == "generation":
            run.wait_for("a response", lambda: run.responses_graded() > 0)
        else:
            run.wait_for("a batch", lambda: run.responses_graded() == RESPONSES_PER_STEP)
            time.sleep(2.0)  # into the updates
        run.note_files()
        return run

    yield reach
    for run in started:
        run.close()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("engine start", signal.SIGINT),
        ("generation", signal.SIGTERM),
        pytest.param("training", signal.SIGINT, marks=SLOW),
        pytest.param("engine launch", signal.SIGTERM, marks=SLOW),
        pytest.param("generation", signal.SIGINT, marks=SLOW),
        pytest.param("training", signal.SIGTERM, marks=SLOW),
    ],
)
def test_a_signal_ends_everything(runs: Starter, moment: str, number: signal.Signals) -> None:
    run = runs(moment)
    asked = time.monotonic()
    run.process.send_signal(number)
    assert run.process.wait(LONGEST_EXIT_SECONDS) == 128 + number
    assert time.monotonic() - asked < LONGEST_EXIT_SECONDS
    run.wait_until_gone()
    assert not (run.folder / "hf").exists()


@SLOW
@pytest.mark.parametrize("moment", ["generation", "training"])
def test_killing_the_launcher_ends_everything(runs: Starter, moment: str) -> None:
    run = runs(moment)
    run.process.kill()
    run.process.wait()
    run.wait_until_gone()


@SLOW
def test_killing_rank_0_ends_everything(runs: Starter) -> None:
    run = runs("generation")
    run.rank(0).kill()
    assert run.process.wait(LONGEST_EXIT_SECONDS) == 137
    run.wait_until_gone()
    assert "trainer rank 0 was ended by SIGKILL" in run.output()


@SLOW
def test_killing_another_rank_ends_everything(runs: Starter) -> None:
    run = runs("training")
    run.rank(1).kill()
    assert run.process.wait(LONGEST_EXIT_SECONDS) == 137
    run.wait_until_gone()
    assert "trainer rank 1 was ended by SIGKILL" in run.output()


@SLOW
@pytest.mark.parametrize("victim", [0, 1, -1])
def test_a_killed_engine_ends_the_run_with_its_name_and_log(runs: Starter, victim: int) -> None:
    """Guardian, server and worker process: whichever dies, the run does not hang."""
    run = runs("generation")
    run.engine()[victim].kill()
    assert run.process.wait(LONGEST_EXIT_SECONDS) == 1
    run.wait_until_gone()
    output = run.output()
    assert "rollout engine 0" in output
    assert str(run.engine_log) in output


@SLOW
def test_sigusr1_saves_the_running_step_and_the_same_command_goes_on(
    start: Start, runs: Starter
) -> None:
    run = runs("a step is done")
    run.process.send_signal(signal.SIGUSR1)
    assert run.process.wait(2 * LONGEST_EXIT_SECONDS) == 75
    run.wait_until_gone()
    done = max(read_metrics(run.metrics_file))
    latest = run.folder / "checkpoints" / "latest"
    assert latest.read_text() == f"step_{done:08d}\n"
    again = train(start, run.folder.name, *LAYOUT, f"training.steps={done + 1}")
    assert list(again.metrics) == list(range(1, done + 2))
    assert latest.read_text() == f"step_{done + 1:08d}\n"
