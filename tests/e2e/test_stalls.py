"""A trainer rank that is stopped: the run ends with the phase, the rank, and the others' stacks."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.processes import RunningTrain, start_train
from tests.e2e.runs import Start, make_start
from tests.e2e.test_signals import phase_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LAYOUT = ("parallel.tensor=2", "sampling.dynamic=false", "training.steps=5000")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    pytest.importorskip("vllm")
    return make_start(tmp_path_factory.mktemp("stalled"), "qwen3")


@pytest.fixture
def run(start: Start) -> Iterator[RunningTrain]:
    started = start_train(start, "stalled", *LAYOUT, "parallel.stall_seconds=20")
    yield started
    started.close()


def test_a_stopped_rank_ends_the_run_with_stacks_and_its_number(run: RunningTrain) -> None:
    run.wait_for("two steps", lambda: phase_of(run.folder).endswith(" 3"))
    run.note_files()
    run.rank(1).send_signal(signal.SIGSTOP)
    assert run.process.wait(300) == 1
    run.wait_until_gone()
    output = run.output()
    assert "no trainer rank has moved for parallel.stall_seconds=20 in phase" in output
    assert "rank 1 does not answer any more" in output
    stacks = (run.folder / "logs" / "stacks" / "rank_0.txt").read_text()
    assert "trainer.py" in stacks
    assert not (run.folder / "logs" / "stacks" / "rank_1.txt").exists()
