"""Ranks that stand still: found from notes on disk, ended with stacks, phase and rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_dapo.observability.watchdog import Note, Watchdog, _Seen
from tests.conftest import REPOSITORY

PATIENCE_SECONDS = 60.0
STALL_SECONDS = 6.0
"""Also what a machine may take its time away from one process before that counts as silent: a third
of it."""
RANK = """
import logging, os, sys, time
from pathlib import Path
from megatron_dapo.observability.watchdog import Watchdog
logging.basicConfig(level=logging.INFO)
rank, still_from = int(sys.argv[1]), int(sys.argv[2])
watchdog = Watchdog(Path(sys.argv[3]), rank, 3, float(sys.argv[4]))
watchdog.start()
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

    def start(self, still_from: tuple[int, int, int]) -> None:
        for rank, step in enumerate(still_from):
            arguments = map(str, (rank, step, self.folder, STALL_SECONDS))
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


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def note_of(folder: Path, rank: int = 0) -> Note:
    """What a rank has noted last; a note of no step before the first."""
    file = folder / "progress" / f"rank_{rank}.json"
    return Note(**json.loads(file.read_text())) if file.exists() else Note()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()


def test_ranks_that_wait_for_one_another_end_with_stacks_and_the_one_behind(ranks: Ranks) -> None:
    ranks.start((5, 3, 5))
    ended = [ranks.end(rank) for rank in range(3)]
    assert [code for code, _ in ended] == [1, 1, 1]
    expected = "no trainer rank has moved for parallel.stall_seconds=6 in phase update_actor of "
    for rank, (_, output) in enumerate(ended):
        assert f"{expected}step 3: rank 1 is the one that is behind" in output
        assert "wait_in_a_collective" in ranks.stacks(rank)
        assert ranks.stacks(rank).startswith("update_actor of step")


def test_a_process_that_was_stopped_is_named_by_the_others(ranks: Ranks) -> None:
    ranks.start((399, 10, 10))
    wait_until(lambda: note_of(ranks.folder).step > 2)
    ranks.processes[0].send_signal(signal.SIGSTOP)
    code, output = ranks.end(2)
    assert code == 1
    assert "rank 0 does not answer any more" in output
    assert ranks.end(1)[0] == 1
    assert not (ranks.folder / "stacks" / "rank_0.txt").exists()


def test_responses_that_a_rank_has_received_are_noted(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, 0, 1, 600.0)
    watchdog.start(lambda: 7)
    watchdog.enter(1, "gen")
    wait_until(lambda: note_of(tmp_path).step == 1)
    watchdog.close()
    assert note_of(tmp_path).beats == 7


@pytest.mark.parametrize(
    "notes",
    [
        [Note(1, "gen", marks) for marks in range(100)],
        [Note(1, "gen", 1, beats) for beats in range(100)],
    ],
    ids=["moves", "receives responses"],
)
def test_a_rank_that_moves_or_receives_responses_is_waited_for(notes: list[Note]) -> None:
    seen, still = _Seen(2), Note(1, "gen", 1)
    for second, note in enumerate(notes):
        assert seen.look({0: note, 1: still}, float(second)) == second
    assert seen.look({0: notes[-1], 1: still}, 500.0) == 99


def test_what_ended_another_start_does_not_end_this_one(tmp_path: Path) -> None:
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "stall.json").write_text(json.dumps({"message": "of another start"}))
    watchdog = Watchdog(tmp_path, 0, 1, 600.0)
    watchdog.start()
    for step in range(1, 30):
        watchdog.enter(step, "gen")
        wait_until(lambda step=step: note_of(tmp_path).step == step)
    watchdog.close()


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
    watchdog = Watchdog(tmp_path, 0, 1, 600.0)
    shutil.rmtree(progress)
    watchdog.start()
    wait_until(lambda: "cannot be exchanged" in caplog.text)
    progress.mkdir()
    watchdog.enter(7, "gen")
    wait_until(lambda: note_of(tmp_path).step == 7)
    watchdog.close()
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
(Path(sys.argv[1]) / "stacks").rmdir()
watch.start()
watch.enter(3, "gen")
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
