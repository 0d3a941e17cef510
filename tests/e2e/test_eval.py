"""`megatron-dapo eval` on real engines finds what the run found inside its loop."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_dapo.observability.evaluation_files import evaluation_file
from megatron_dapo.observability.run_files import read_lines
from tests.e2e.conftest import TrainingRuns
from tests.e2e.processes import RunningTrain, start_command
from tests.e2e.runs import (
    Run,
    Start,
    command,
    make_start,
)

pytestmark = pytest.mark.timeout(3600)
STEP = 2
NAME = "heldout"
LONGEST_EXIT_SECONDS = 240.0
SAME_RESPONSES = 0.9
"""Share of responses that are the same token for token. Seeds and weights are equal; what other
requests an engine works on at the same time may turn a last bit, and with it a token."""


@pytest.fixture(scope="module")
def run(training_runs: TrainingRuns) -> Run:
    return training_runs["qwen3_moe ep2 dp2"]


@pytest.fixture(scope="module")
def evaluated(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run's last checkpoint was evaluated, by a command of its own."""
    out = tmp_path_factory.mktemp("eval") / "out"
    checkpoint = run.folder / "checkpoints" / f"step_{STEP:08d}"
    done = command("eval", checkpoint, "--out", out)
    assert done.code == 0, done.output
    assert str(out / "report.json") in done.out
    assert NAME in done.out
    return out


def test_a_checkpoint_has_the_accuracy_that_its_run_logged(run: Run, evaluated: Path) -> None:
    report = json.loads((evaluated / "report.json").read_text())
    assert report["step"] == STEP
    average = report["sets"][NAME]["result"]["avg"]
    logged = run.records[STEP][f"val-core/{NAME}/acc/mean@2"]
    logged_error = run.records[STEP][f"val-core/{NAME}/acc/mean@2/sampling_error"]
    error = math.hypot(average["sampling_error"], logged_error)
    assert 0 < average["value"] < 1
    assert abs(average["value"] - logged) <= 3 * error


def test_the_same_seeds_give_the_same_responses(run: Run, evaluated: Path) -> None:
    inside = read_lines(evaluation_file(run.folder, STEP, ".jsonl"))
    alone = read_lines(evaluated / "samples.jsonl")
    places = [(row["set"], row["prompt_id"], row["sample_index"], row["seed"]) for row in alone]
    assert places == [
        (row["set"], row["prompt_id"], row["sample_index"], row["seed"]) for row in inside
    ]
    assert len({row["seed"] for row in alone}) == len(alone)
    same = sum(a["response"] == b["response"] for a, b in zip(alone, inside, strict=True))
    assert same >= SAME_RESPONSES * len(alone)


def test_counts_are_those_of_the_responses(run: Run, evaluated: Path) -> None:
    for samples, result in (
        (
            read_lines(evaluated / "samples.jsonl"),
            json.loads((evaluated / "report.json").read_text())["sets"][NAME]["result"],
        ),
        (
            read_lines(evaluation_file(run.folder, STEP, ".jsonl")),
            json.loads(evaluation_file(run.folder, STEP, ".json").read_text())[NAME],
        ),
    ):
        counts = result["counts"]
        assert counts["samples"] == len(samples) == result["problems"] * result["k"]
        assert counts["right"] == sum(row["accuracy"] == 1.0 for row in samples)
        assert counts["truncated"] == sum(row["finish_reason"] == "length" for row in samples)
        assert counts["tokens"] == sum(int(str(row["response_tokens"])) for row in samples)
        assert counts["ungraded"] == 0


def test_nothing_is_left_of_the_export(evaluated: Path) -> None:
    kept = {"config.resolved.yaml", "versions.json", "report.json", "samples.jsonl", "logs"}
    assert {path.name for path in evaluated.iterdir()} == kept


@pytest.fixture
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTrain]:
    """`eval` of a model folder, started."""
    pytest.importorskip("vllm")
    start = make_start(tmp_path_factory.mktemp("interrupted"), "qwen3")
    running = start_eval(start)
    yield running
    running.close()


def start_eval(start: Start) -> RunningTrain:
    out = start.folder / "out"
    arguments = ("eval", start.file, "--out", out)
    return start_command(*arguments, folder=out, graded=start.folder / "graded")


def test_ctrl_c_leaves_no_engine(evaluation: RunningTrain) -> None:
    def engine_speaks() -> bool:
        return evaluation.engine_log.exists() and evaluation.engine_log.stat().st_size > 0

    evaluation.wait_for("the engine's first words", engine_speaks)
    evaluation.note_files()
    assert any("vllm" in " ".join(words(process)) for process in evaluation.processes())
    evaluation.process.send_signal(signal.SIGINT)
    assert evaluation.process.wait(LONGEST_EXIT_SECONDS) == 128 + signal.SIGINT
    evaluation.wait_until_gone()
    assert not (evaluation.folder / "report.json").exists()


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it just ended
        return []
