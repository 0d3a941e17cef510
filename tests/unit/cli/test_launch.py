"""The launcher, with small scripts as ranks: exit codes, logs, signals, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from megatron_dapo.cli import launch
from megatron_dapo.cli.launch import launch_ranks, launch_training
from megatron_dapo.config import ConfigError
from megatron_dapo.config.errors import EXIT_CONFIG
from tests.conftest import REPOSITORY
from tests.unit.config.runs import make_config

PATIENCE_SECONDS = 60.0
BY_RANK = "import os, sys, time; rank = int(os.environ['RANK']); "


def run(script: str, world_size: int, folder: Path) -> int:
    return launch_ranks(["-c", BY_RANK + script], world_size, folder / "logs")


def test_every_rank_gets_its_place_and_all_done_is_exit_code_0(tmp_path: Path) -> None:
    script = f"open(f'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[n] for n in NAMES))"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    assert run(f"NAMES = {names}; {script}", 2, tmp_path) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["0 0 2 2 1", "1 1 2 2 1"]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sys.exit({0: 0, 1: 5}[rank])", 5),
        ("rank == 0 and time.sleep(600); sys.exit(6)", 6),
        ("rank == 1 and time.sleep(600); sys.exit(78)", 78),
        ("rank == 1 and os.kill(os.getpid(), 9)", 137),
        ("rank == 1 and os.kill(os.getpid(), 9); time.sleep(600)", 137),
    ],
)
def test_the_first_failure_ends_all_ranks_and_gives_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, code: int
) -> None:
    monkeypatch.setattr(launch, "SETTLE_SECONDS", 0.5)
    started = time.monotonic()
    assert run(script, 2, tmp_path) == code
    assert time.monotonic() - started < PATIENCE_SECONDS


def test_a_rank_that_failed_first_may_close_its_engines_after_its_peers_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SETTLE_SECONDS", PATIENCE_SECONDS)
    assert run("rank == 0 and time.sleep(1); sys.exit([5, 6][rank])", 2, tmp_path) == 5


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ([3, 4], 0),
        ([1, 75], 1),
        ([1, 78], 1),
        ([-9, None, 78], 2),
        ([0, 1], 1),
        ([1, -9], 1),
        ([-6, 1], 0),
        ([1, -6], 0),
    ],
)
def test_a_chosen_exit_code_then_a_killed_rank_explains_a_failure(
    codes: list[int | None], cause: int
) -> None:
    assert launch._first_cause(codes) == cause


def test_the_last_lines_of_a_failed_rank_come_to_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = launch.TAIL_LINES
    script = f"rank and [print(f'line {{n}}') for n in range({lines + 5})]; sys.exit(rank * 9)"
    assert run(script, 2, tmp_path) == 9
    answer = capsys.readouterr().err.splitlines()
    assert answer[0] == "trainer rank 1 ended with exit code 9"
    assert answer[1:] == [f"line {number}" for number in range(5, lines + 5)]


def test_a_rank_that_does_not_end_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
    stubborn = "import signal, subprocess; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid"
    tell = f"open('{tmp_path}/child', 'w').write(str({child})); "
    wait = f"\nwhile not os.path.exists('{tmp_path}/child'): time.sleep(0.01)\n"
    script = f"{stubborn}\nif rank == 0: {tell} time.sleep(600)\n{wait}sys.exit(7)"
    assert run(script, 2, tmp_path) == 7
    wait_until(lambda: not_running(int((tmp_path / "child").read_text())))


def test_children_of_a_rank_that_died_are_ended(tmp_path: Path) -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid"
    script = f"import subprocess; open('{tmp_path}/child', 'w').write(str({child})); os._exit(3)"
    assert run(script, 1, tmp_path) == 3
    wait_until(lambda: not_running(int((tmp_path / "child").read_text())))


MEET = """
import torch, torch.distributed as dist
from datetime import timedelta
from megatron_dapo.parallel.launch_env import init_process_group, read_launch_env
init_process_group(read_launch_env(os.environ), timeout=timedelta(seconds=60), backend="gloo")
total = torch.tensor(rank + 1)
dist.all_reduce(total, group=dist.new_group([0, 1], backend="gloo"))
dist.destroy_process_group()
sys.exit(40 + total.item())
"""


def test_ranks_meet_and_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert run(f"{MEET}", 2, tmp_path) == 43
    assert list((tmp_path / "temporary").iterdir()) == []


def test_several_machines_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.nodes=2: .*run\.sh.*srun or torchrun"):
        launch_training(make_config(parallel={"nodes": 2}))


def test_a_second_run_in_a_run_directory_is_refused_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config().model_copy(update={"run_dir": tmp_path})
    monkeypatch.setattr(launch.RolloutInputs, "read", lambda config: None)
    held_while_running = []

    def second_run(command: list[str], world_size: int, logs: Path, files: list[int]) -> int:
        (tmp_path / "config.resolved.yaml").write_text("the first run's")
        with pytest.raises(ConfigError, match=r"run_dir=.*another run is going on") as caught:
            launch_training(config)
        held_while_running.append(caught.value)
        return 0

    monkeypatch.setattr(launch, "launch_ranks", second_run)
    assert launch_training(config) == 0
    assert launch_training(config) == 0  # the lock went with its holder
    assert len(held_while_running) == 2
    assert (tmp_path / "config.resolved.yaml").read_text() == "the first run's"


def launch_scripts(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, script: str, *, world_size: int = 2
) -> int:
    """`launch_training` with `script` in place of each trainer rank."""
    config = make_config(parallel={"data": world_size}).model_copy(update={"run_dir": run_dir})
    really = launch.launch_ranks

    def launch_them(
        command: list[str], world_size: int, logs: Path, files: Sequence[int] = ()
    ) -> int:
        assert command[:3] == ["-m", "megatron_dapo.train", "--config"]
        scripted = ["-c", BY_RANK + script, *command[3:], str(run_dir)]
        return really(scripted, world_size, logs, files)

    monkeypatch.setattr(launch, "launch_ranks", launch_them)
    monkeypatch.setattr(launch.RolloutInputs, "read", lambda config: None)
    return launch_training(config)


def test_every_rank_reads_the_resolved_configuration_from_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    read = (
        "from megatron_dapo.config import load_config; config = load_config(sys.argv[1]); "
        "sys.exit(0 if str(config.run_dir) == sys.argv[2] and config.parallel.data == 2 else 9)"
    )
    assert launch_scripts(monkeypatch, tmp_path / "run", read) == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"logs"}


@pytest.mark.parametrize(("code", "left"), [(EXIT_CONFIG, False), (1, True), (0, True)])
def test_a_refused_configuration_leaves_nothing_of_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, left: bool
) -> None:
    write = "from pathlib import Path; Path(sys.argv[2], f'rank_{rank}').touch(); "
    assert launch_scripts(monkeypatch, tmp_path / "run", f"{write} sys.exit({code})") == code
    assert (tmp_path / "run").exists() == left


def test_a_refused_configuration_leaves_a_directory_that_was_made_for_it_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    write = "from pathlib import Path; Path(sys.argv[2], f'rank_{rank}').touch(); "
    script = f"{write} sys.exit({EXIT_CONFIG})"
    assert launch_scripts(monkeypatch, tmp_path / "run", script) == EXIT_CONFIG
    assert list((tmp_path / "run").iterdir()) == []  # what train --fresh asks for


def test_a_refused_configuration_changes_nothing_of_an_older_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = {"config.resolved.yaml": "older", "versions.json": "{}", "metrics.jsonl": "1"}
    for name, text in older.items():
        (tmp_path / name).write_text(text)
    assert launch_scripts(monkeypatch, tmp_path, f"sys.exit({EXIT_CONFIG})") == EXIT_CONFIG
    found = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert found == older


LAUNCHER = """
import sys
from pathlib import Path
from megatron_dapo.cli.launch import launch_ranks
sys.exit(launch_ranks(["-c", sys.argv[1]], 2, Path(sys.argv[2], "logs")))
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
def leave(number, frame):
    Path("{folder}", f"cleaned{{os.environ['RANK']}}").touch()
    sys.exit(1)
signal.signal(signal.SIGINT, leave)
Path("{folder}", f"pid{{os.environ['RANK']}}").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a launcher in a process of its own, and waits for its two ranks."""
    processes = []

    def start(*prefix: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", LAUNCHER, RANK.format(folder=tmp_path), str(tmp_path)],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        wait_until(lambda: all((tmp_path / f"pid{rank}").exists() for rank in (0, 1)))
        wait_until(lambda: all(rank_pid(tmp_path, rank) for rank in (0, 1)))
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def rank_pid(folder: Path, rank: int) -> int:
    return int((folder / f"pid{rank}").read_text() or 0)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def not_running(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_lets_all_ranks_clean_up(
    launcher: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    number: signal.Signals,
    code: int,
) -> None:
    process = launcher()
    process.send_signal(number)
    assert process.wait(PATIENCE_SECONDS) == code
    assert all((tmp_path / f"cleaned{rank}").exists() for rank in (0, 1))
    assert all(not_running(rank_pid(tmp_path, rank)) for rank in (0, 1))


def test_a_signal_to_the_terminal_reaches_the_launcher_alone(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = launcher()
    sessions = {os.getsid(rank_pid(tmp_path, rank)) for rank in (0, 1)}
    assert len(sessions | {os.getsid(process.pid)}) == 3


LISTEN = (
    "import signal, threading; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1]); "
)


@pytest.mark.parametrize("number", ["SIGUSR1", "SIGTERM"])
def test_a_signal_to_save_is_passed_on_and_all_ranks_say_75(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: str
) -> None:
    ask = f"threading.Timer(2.0, os.kill, (os.getppid(), signal.{number})).start(); "
    script = f"{LISTEN}rank == 0 and [{ask[:-2]}]; time.sleep(600)"
    assert run(script, 2, tmp_path) == 75
    assert "saved and stopped" in capfd.readouterr().err


@pytest.mark.parametrize("number", ["SIGUSR1", "SIGTERM"])
def test_a_rank_that_does_not_listen_yet_survives_a_signal_to_save(
    tmp_path: Path, number: str
) -> None:
    assert run(f"import signal; os.kill(os.getpid(), signal.{number})", 1, tmp_path) == 0


def test_a_rank_hears_a_signal_that_came_before_it_listened(tmp_path: Path) -> None:
    script = f"import signal; os.kill(os.getpid(), signal.SIGUSR1); {LISTEN} time.sleep(600)"
    assert run(script, 1, tmp_path) == 75


def test_one_rank_that_leaves_before_all_have_met_takes_the_others_along(tmp_path: Path) -> None:
    assert run(f"{LISTEN} rank == 1 and sys.exit(75); time.sleep(600)", 2, tmp_path) == 75


def test_nohup_keeps_a_run_alive_when_the_terminal_closes(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = launcher("nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 130


def test_killing_the_launcher_kills_its_ranks(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = launcher()
    process.kill()
    process.wait(PATIENCE_SECONDS)
    wait_until(lambda: all(not_running(rank_pid(tmp_path, rank)) for rank in (0, 1)))
