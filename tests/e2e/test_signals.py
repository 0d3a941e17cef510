"""Signals and kill -9 at bad moments: the exit code, what is saved, and that nothing is left."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_dapo.observability.run_files import read_metrics
from tests.e2e.processes import RunningTrain, start_train
from tests.e2e.runs import Start, depends_on_training, make_start, same_number, train

pytestmark = pytest.mark.timeout(1800)
LONGEST_EXIT_SECONDS = 240.0
"""10 s are enough for a machine that does nothing else; who hears nothing goes on for ever."""
LAYOUT = ("parallel.tensor=2", "sampling.dynamic=false")
LONG_GENERATION = (
    "rollout.prompts_per_step=64",
    "rollout.max_response_tokens=400",
    "rollout.max_concurrent_sequences=8",
    "training.tokens_per_micro_batch=512",
)
LONG_TRAINING = ("training.epochs=5000",)
EXTRA = {"generation": LONG_GENERATION, "training": LONG_TRAINING}
RESPONSES_PER_STEP = 16
SLOW = pytest.mark.slow

log = logging.getLogger(__name__)

Starter = Callable[..., RunningTrain]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    pytest.importorskip("vllm")
    return make_start(tmp_path_factory.mktemp("interrupted"), "qwen3")


@pytest.fixture
def runs(start: Start, request: pytest.FixtureRequest) -> Iterator[Starter]:
    """Starts a run and brings it to a moment; its processes are listed by then."""
    started: list[RunningTrain] = []

    def reach(moment: str, *overrides: str, name: str = "") -> RunningTrain:
        name = name or request.node.name.replace(" ", "_")
        run = start_train(start, name, *LAYOUT, *EXTRA.get(moment, ()), *overrides)
        started.append(run)
        if moment == "engine launch":
            run.wait_for("the engine's log", run.engine_log.exists)
        elif moment == "engine start":
            run.wait_for("the engine's first words", lambda: _size(run.engine_log) > 0)
        elif moment == "generation":
            run.wait_for("a response", lambda: run.responses_graded() > 0)
        elif moment == "training":
            run.wait_for("a batch", lambda: run.responses_graded() == RESPONSES_PER_STEP)
            time.sleep(2.0)  # into the updates
        else:
            run.wait_for(moment, lambda: phase_of(run.folder) == moment)
        run.note_files()
        return run

    yield reach
    for run in started:
        run.close()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def phase_of(folder: Path) -> str:
    """Phase and step that rank 0 is in, such as `gen 3`."""
    note = folder / "logs" / "progress" / "rank_0.json"
    if not note.exists():
        return ""
    place = json.loads(note.read_text())
    return f"{place['phase']} {place['step']}"


def exit_code(run: RunningTrain) -> int:
    """Code of a run that was just signalled; its seconds are shown by `--log-cli-level=info`."""
    told = time.monotonic()
    code = run.process.wait(LONGEST_EXIT_SECONDS)
    log.info("exit %d after %.1f s", code, time.monotonic() - told)
    run.wait_until_gone()
    return code


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("generation", signal.SIGINT),
        pytest.param("engine start", signal.SIGINT, marks=SLOW),
        pytest.param("training", signal.SIGINT, marks=SLOW),
        pytest.param("generation", signal.SIGHUP, marks=SLOW),
    ],
)
def test_ctrl_c_ends_everything_at_once(runs: Starter, moment: str, number: signal.Signals) -> None:
    run = runs(moment)
    run.process.send_signal(number)
    assert exit_code(run) == 128 + number
    assert not (run.folder / "hf").exists()
    assert not list(run.folder.glob("checkpoints/step_*"))


@pytest.mark.parametrize(
    ("moment", "rank", "number"),
    [
        ("generation", 1, signal.SIGTERM),
        pytest.param("engine launch", 1, signal.SIGUSR1, marks=SLOW),
        pytest.param("engine start", None, signal.SIGTERM, marks=SLOW),
        pytest.param("engine start", 1, signal.SIGTERM, marks=SLOW),
        pytest.param("generation", 0, signal.SIGUSR1, marks=SLOW),
    ],
)
def test_a_stop_before_the_first_update_has_nothing_to_save(
    runs: Starter, moment: str, rank: int | None, number: signal.Signals
) -> None:
    """One rank hears of it, in a collective or not: all leave, as a run that can be started again.

    Without a rank, the launcher is told and passes it on to all.
    """
    run = runs(moment)
    if rank is None:
        run.process.send_signal(number)
    else:
        run.rank(rank).send_signal(number)
    assert exit_code(run) == 75
    assert not list(run.folder.glob("checkpoints/step_*"))
    assert "saved and stopped; the same command goes on" in run.output()


STEPS = 7
STOPS = [
    ("gen 1", 1, signal.SIGTERM, 0),
    ("gen 2", 0, signal.SIGTERM, 1),
    ("old_log_prob 3", None, signal.SIGUSR1, 2),
    ("update_actor 4", 1, signal.SIGUSR1, 4),
    ("weight_sync 5", 0, signal.SIGUSR1, 5),
    ("testing 6", 1, signal.SIGTERM, 6),
    ("saving 7", None, signal.SIGTERM, 7),
]
"""Phase, the rank that is signalled (None: the launcher), and the step that is saved at least."""
EVERY_PHASE = (
    f"training.steps={STEPS}",
    "training.epochs=5",
    "rollout.prompts_per_step=8",
    "rollout.max_response_tokens=32",
    "checkpoint.every=1",
    "evaluation.every=1",
)


@SLOW
@pytest.mark.timeout(3600)
def test_a_run_that_is_stopped_in_every_phase_ends_as_one_that_never_was(
    start: Start, runs: Starter
) -> None:
    stopped = start.folder / "stopped_in_every_phase"
    for moment, rank, number, least in STOPS:
        run = runs(moment, *EVERY_PHASE, name=stopped.name)
        target = run.process if rank is None else run.rank(rank)
        target.send_signal(number)
        target.send_signal(number)  # told twice
        code = exit_code(run)
        assert code == (0 if run.folder.joinpath("hf").exists() else 75), run.output()
        assert newest_step(stopped) >= least
    again = train(start, stopped.name, *LAYOUT, *EVERY_PHASE)
    straight = train(start, "never_stopped", *LAYOUT, *EVERY_PHASE)
    assert list(again.records) == list(straight.records) == list(range(STEPS + 1))
    for step, record in straight.records.items():
        same = {k: v for k, v in record.items() if depends_on_training(k)}
        resumed = {k: v for k, v in again.records[step].items() if depends_on_training(k)}
        assert resumed.keys() == same.keys(), f"step {step}"
        different = {k for k, v in same.items() if not same_number(v, resumed[k])}
        assert not different, f"step {step}: {sorted(different)}"


def newest_step(folder: Path) -> int:
    found = [int(path.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*")]
    return max(found, default=0)


@SLOW
@pytest.mark.parametrize("moment", ["generation", "training"])
def test_killing_the_launcher_ends_everything(runs: Starter, moment: str) -> None:
    run = runs(moment)
    run.process.kill()
    run.process.wait()
    run.wait_until_gone()


@SLOW
@pytest.mark.parametrize(("moment", "victim"), [("generation", 0), ("training", 1)])
def test_killing_a_rank_ends_everything(runs: Starter, moment: str, victim: int) -> None:
    run = runs(moment)
    run.rank(victim).kill()
    assert exit_code(run) == 137
    assert f"trainer rank {victim} was ended by SIGKILL" in run.output()


@SLOW
@pytest.mark.parametrize("victim", [0, 1, -1])
def test_a_killed_engine_without_restarts_ends_the_run_with_its_name_and_log(
    runs: Starter, victim: int
) -> None:
    """Guardian, server and worker process: whichever dies, the run does not hang."""
    run = runs("generation", "rollout.max_restarts=0")
    run.engine()[victim].kill()
    assert exit_code(run) == 1
    output = run.output()
    assert "rollout engine 0 was restarted 0 times (rollout.max_restarts)" in output
    assert str(run.engine_log) in output


@SLOW
def test_sigusr1_saves_the_running_step_and_the_same_command_goes_on(
    start: Start, runs: Starter
) -> None:
    run = runs("gen 3", "training.steps=5000")
    run.process.send_signal(signal.SIGUSR1)
    assert exit_code(run) == 75
    done = max(read_metrics(run.metrics_file))
    assert newest_step(run.folder) == done
    again = train(start, run.folder.name, *LAYOUT, f"training.steps={done + 1}")
    assert list(again.metrics) == list(range(1, done + 2))
    assert newest_step(again.folder) == done + 1
