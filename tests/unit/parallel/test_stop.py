"""A stop is heard wherever a rank sits, and by ranks that were not signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_dapo.parallel.stop import SIGNALS, SignalsHeld, StopRequest
from tests.conftest import REPOSITORY
from tests.unit.conftest import Alone

PATIENCE_SECONDS = 60.0
HEAD = """
import os, subprocess, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from megatron_dapo.parallel.stop import SignalsHeld, StopRequest
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
store = dist.FileStore(str(folder / "store"), 2)
stop = StopRequest()
stop.listen()
def ready():
    (folder / f"ready{rank}").touch()
def sit_in_c():
    ready()
    store.wait(["never"], timedelta(seconds=600))
def until_set():
    while not stop.is_set():
        time.sleep(0.01)
try:
"""
TAIL = """
finally:
    stop.close()
"""
Ranks = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Starts one process for each body, and waits until all are ready."""
    started: list[subprocess.Popen[str]] = []

    def start(*bodies: str) -> list[subprocess.Popen[str]]:
        for rank, body in enumerate(bodies):
            lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", HEAD + lines + TAIL, str(tmp_path), str(rank)],
                    env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(len(bodies))):
            assert time.monotonic() < deadline, [p.poll() for p in started]
            time.sleep(0.02)
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def code(process: subprocess.Popen[str]) -> int:
    return process.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("number", sorted(SIGNALS))
@pytest.mark.parametrize("body", ["ready(); time.sleep(600)", "sit_in_c()"])
def test_before_the_first_step_a_signal_ends_the_process_as_saved(
    ranks: Ranks, body: str, number: int
) -> None:
    (process,) = ranks(body)
    process.send_signal(number)
    assert code(process) == 75


def test_before_the_first_step_one_signalled_rank_ends_both(ranks: Ranks) -> None:
    body = "stop.share(store, 2)\nsit_in_c()"
    processes = ranks(body, body)
    processes[1].send_signal(signal.SIGTERM)
    assert [code(process) for process in processes] == [75, 75]


def test_a_running_rank_in_a_collective_hears_and_tells_the_other(
    ranks: Ranks, tmp_path: Path
) -> None:
    signalled = "stop.share(store, 2)\nstop.started(lambda: store.set('never', '1'))\nsit_in_c()"
    other = "stop.share(store, 2)\nstop.started()\nready()\nuntil_set()"
    told = f"\nPath('{tmp_path}', 'told').write_text(str(stop.is_set()))\nsys.exit(7)"
    processes = ranks(signalled + "\nsys.exit(6)", other + told)
    processes[0].send_signal(signal.SIGUSR1)
    processes[0].send_signal(signal.SIGTERM)  # asking again changes nothing
    assert [code(process) for process in processes] == [6, 7]
    assert (tmp_path / "told").read_text() == "True"


def test_a_signal_after_the_end_does_not_change_the_exit_code(ranks: Ranks) -> None:
    body = "stop.started()\nstop.close()\nready()\ntime.sleep(2)\nsys.exit(0)"
    (process,) = ranks(body)
    for number in SIGNALS:
        process.send_signal(number)
    assert code(process) == 0


def test_processes_that_are_started_while_signals_are_held_do_not_die_of_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    body = (
        "stop.started()\n"
        "with SignalsHeld():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3)'])\n"
        f"    Path('{tmp_path}', 'child').write_text(str(child.pid))\n"
        "    ready()\n"
        "    until_set()\n"  # this process hears what its child does not
        "sys.exit(child.wait())"
    )
    (process,) = ranks(body)
    for number in SIGNALS:
        os.kill(int((tmp_path / "child").read_text()), number)
    process.send_signal(signal.SIGUSR1)
    assert code(process) == 0


def test_held_signals_are_let_in_again() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with SignalsHeld():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= SIGNALS
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_request_that_came_just_before_the_start_interrupts_at_once() -> None:
    stop, interrupted = StopRequest(), threading.Event()
    stop.set()
    stop.started(interrupted.set)
    assert interrupted.is_set()


def test_ranks_agree_on_what_one_was_asked(alone: Alone) -> None:
    stop = StopRequest()
    assert not stop.agreed(alone.control_group)
    stop.set()
    assert stop.agreed(alone.control_group)
