"""Ranks that stand still: found from notes on disk, ended with stacks, phase and rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.observability.watchdog import Note, Watchdog, _Seen
from tests.conftest import REPOSITORY

PATIENCE_SECONDS = 60.0
RANK = """
import logging, os, sys, time
from pathlib import Path
from megatron_dapo.observability.watchdog import Watchdog
logging.basicConfig(level=logging.INFO)
rank, still_from = int(sys.argv[1]), int(sys.argv[2])
watchdog = Watchdog(Path(sys.argv[3]), rank, 3, float(sys.argv[4]))
receives = sys.argv[5] == "receives" and rank == 0
watchdog.start((lambda: int(time.monotonic() * 20)) if receives else None)
def wait_in_a_collective():
    time.sleep(600)
for step in range(1, 400):
    watchdog.enter(step, "gen")
    watchdog.enter(step, "update_actor")
    time.sleep(0.05)
    if step == still_from:
        wait_in_a_collective()
watchdog.close()
"""


class Ranks:
    """Three processes with a watchdog each; rank n does nothing any more from a step on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, still_from: tuple[int, int, int], limit: float, kind: str = "") -> None:
        for rank, step in enumerate(still_from):
            arguments = map(str, (rank, step, self.folder, limit, kind))
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", RANK, *arguments],
                    env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def end(self, rank: int) -> tuple[int, str]:
        output, _ = self.processes[rank].communicate(timeout=PATIENCE_SECONDS)
        return self.processes[rank].returncode, output

    def stacks(self, rank: int) -> str:
        return (self.folder / "stacks" / f"rank_{rank}.txt").read_text()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()


def test_ranks_that_wait_for_one_another_end_with_stacks_and_the_one_behind(ranks: Ranks) -> None:
    ranks.start((5, 3, 5), limit=2.0)
    ended = [ranks.end(rank) for rank in range(3)]
    assert [code for code, _ in ended] == [1, 1, 1]
    expected = "no trainer rank has moved for parallel.stall_seconds=2 in phase update_actor of "
    for rank, (_, output) in enumerate(ended):
        assert f"{expected}step 3: rank 1 is the one that is behind" in output
        assert "wait_in_a_collective" in ranks.stacks(rank)
        assert ranks.stacks(rank).startswith("update_actor of step")


def test_a_process_that_was_stopped_is_named_by_the_others(ranks: Ranks) -> None:
    ranks.start((399, 10, 10), limit=3.0)
    first = ranks.folder / "progress" / "rank_0.json"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (first.exists() and json.loads(first.read_text())["step"] > 2):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ranks.processes[0].send_signal(signal.SIGSTOP)
    code, output = ranks.end(2)
    assert code == 1
    assert "rank 0 does not answer any more" in output
    assert ranks.end(1)[0] == 1
    assert not (ranks.folder / "stacks" / "rank_0.txt").exists()


def test_a_rank_that_receives_responses_is_waited_for(ranks: Ranks) -> None:
    ranks.start((2, 2, 2), limit=1.0, kind="receives")
    time.sleep(8.0)
    assert [process.poll() for process in ranks.processes] == [None, None, None]


def test_ranks_that_move_are_left_alone_and_leave_nothing_that_ends_the_next(
    tmp_path: Path,
) -> None:
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "stall.json").write_text(json.dumps({"message": "of another start"}))
    watchdog = Watchdog(tmp_path, 0, 1, 0.5)
    watchdog.start()
    for step in range(30):
        watchdog.enter(step, "gen")
        time.sleep(0.05)
    watchdog.close()
    assert json.loads((tmp_path / "progress" / "rank_0.json").read_text())["step"] == 29


def test_without_a_limit_nothing_is_compared(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, 0, 1, 0)
    watchdog.start()
    watchdog.enter(1, "gen")
    watchdog.close()
    assert (tmp_path / "progress" / "rank_0.json").exists()


def test_starting_up_has_its_own_limits() -> None:
    seen = _Seen(2)
    assert seen.look({0: Note(ticks=1), 1: Note(1, "gen", 1)}, 10.0) == 10.0
    assert seen.look({0: Note(ticks=2), 1: Note(1, "gen", 1)}, 500.0) == 500.0
    started = {0: Note(1, "gen", 1), 1: Note(1, "gen", 1)}
    assert seen.look(started, 600.0) == 600.0
    assert seen.look(started, 900.0) == 600.0


@pytest.mark.parametrize(
    ("silent", "expected"), [((), (1, False)), ((2,), (2, True)), ((0, 2), (0, True))]
)
def test_a_silent_rank_is_named_before_one_that_is_behind(
    silent: tuple[int, ...], expected: tuple[int, bool]
) -> None:
    marks = (9, 7, 9)
    seen = _Seen(3)
    for tick in range(1, 8):
        notes = {
            rank: Note(4, "gen", marks[rank], 0, 1 if rank in silent else tick) for rank in range(3)
        }
        seen.look(notes, float(tick))
    rank, _, is_silent = seen.behind(7.0, 3.0)
    assert (rank, is_silent) == expected


def test_notes_go_on_once_they_can_be_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    progress = tmp_path / "progress"
    watchdog = Watchdog(tmp_path, 0, 1, 0.5)
    shutil.rmtree(progress)
    watchdog.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "cannot be exchanged" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    progress.mkdir()
    watchdog.enter(7, "gen")
    while not (progress / "rank_0.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    watchdog.close()
    assert json.loads((progress / "rank_0.json").read_text())["step"] == 7
    assert caplog.text.count("cannot be exchanged") == 1


FULL_DISK = """
import logging, sys, time
from pathlib import Path
from megatron_dapo.observability import watchdog
logging.basicConfig(level=logging.INFO)
replace = watchdog._replace
def full_by_now(path, text):
    if path.name == "stall.json":
        raise OSError(28, "No space left on device")
    replace(path, text)
watchdog._replace = full_by_now
watch = watchdog.Watchdog(Path(sys.argv[1]), 0, 1, 0.5)
watch.start()
watch.enter(3, "gen")
(Path(sys.argv[1]) / "stacks").rmdir()
def wait_in_a_collective():
    time.sleep(600)
wait_in_a_collective()
"""


def test_a_run_that_stands_still_ends_on_a_full_disk_too(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 1
    assert "in phase gen of step 3" in ended.stderr
    assert "wait_in_a_collective" in ended.stderr
