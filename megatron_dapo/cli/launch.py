"""Start the trainer ranks of one machine, watch them, and leave nothing behind.

Several machines are started by srun or torchrun (examples/qwen32b/run.sh), one task per
device; each task then runs `python -m megatron_dapo.train`. On one machine this launcher does
the same: ranks meet through an unnamed file, so no port is opened, and exit codes arrive whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from megatron_dapo.config.errors import EXIT_CONFIG, EXIT_PREEMPTED, ConfigError
from megatron_dapo.config.load import exact_yaml
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.parallel.launch_env import RENDEZVOUS_VARIABLE
from megatron_dapo.rollout.inputs import RolloutInputs

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGHUP)
SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Passed on: the ranks save what is trained and exit with 75."""
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.1
SETTLE_SECONDS = 5.0
TAIL_LINES = 25
LOCK_FILE = "launcher.lock"


def launch_training(config: RunConfig) -> int:
    """Train on this machine and return the exit code of the first rank that failed, or 0.

    Raises:
        ConfigError: the configuration asks for several machines; prompts, tokenizer or reward
            plug-in cannot be used; or another run is going on in `run_dir`.
    """
    if config.parallel.nodes > 1:
        raise ConfigError(
            f"parallel.nodes={config.parallel.nodes}: this command starts one machine. "
            "Use sbatch examples/qwen32b/run.sh, or start `python -m megatron_dapo.train "
            "--config FILE` on every device with srun or torchrun."
        )
    RolloutInputs.read(config)
    logs = config.run_dir / "logs"
    with (
        _nothing_left_when_refused(config.run_dir) as codes,
        _sole_run(config.run_dir, logs),
        _unnamed_file("megatron_dapo_config", exact_yaml(config)) as resolved,
    ):
        command = ["-m", "megatron_dapo.train", "--config", f"/proc/self/fd/{resolved}"]
        codes.append(launch_ranks(command, config.parallel.world_size, logs, [resolved]))
    return codes[0]


@contextlib.contextmanager
def _nothing_left_when_refused(run_dir: Path) -> Iterator[list[int]]:
    """When ranks refuse the configuration, a run directory that was not there goes again, and one
    that was empty is emptied: `--fresh` takes no other.

    Yields:
        A list for the exit code of the ranks.
    """
    there = run_dir.is_dir()
    empty = not there or not any(run_dir.iterdir())
    codes: list[int] = []
    yield codes
    if codes != [EXIT_CONFIG] or not empty:
        return
    for path in run_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not there:
        run_dir.rmdir()


@contextlib.contextmanager
def _sole_run(run_dir: Path, logs: Path) -> Iterator[None]:
    """Two runs would write into the same checkpoints; the kernel frees the lock with its holder."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        opened = (logs / LOCK_FILE).open("a")
    except OSError as error:
        raise ConfigError(
            f"run_dir={run_dir}: cannot be written: {error}. Choose another run_dir."
        ) from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"run_dir={run_dir}: another run is going on in it. Wait for it or stop it, or "
                "choose another run_dir."
            ) from error
        yield


def launch_ranks(
    command: Sequence[str], world_size: int, logs: Path, descriptors: Sequence[int] = ()
) -> int:
    """Run `python COMMAND` once for each rank; the exit code of the first that failed, or 0.

    Rank 0 writes to this console, the others to `logs`. SIGINT and a closed terminal end all ranks,
    with time to clean up, and are answered with 128 + signal. SIGTERM and SIGUSR1 are passed on:
    the ranks save and say 75. Should this process be killed, the kernel ends the ranks.

    Args:
        descriptors: of files that the ranks read as /proc/self/fd/N.
    """
    logs.mkdir(parents=True, exist_ok=True)
    ranks: list[subprocess.Popen[bytes]] = []
    python = [sys.executable, *command]
    with _signals_stop() as stopped, _unnamed_file("megatron_dapo_ranks") as meeting:
        passed = (meeting, *descriptors)
        try:
            for rank in range(world_size):
                ranks.append(_start_rank(python, rank, world_size, passed, logs))
            return _watch(ranks, logs, stopped)
        finally:
            _stop(ranks)


@contextlib.contextmanager
def _signals_stop() -> Iterator[list[int]]:
    """Collect signals that ask to stop instead of dying from them; ignored ones stay ignored."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    signals = (*STOP_SIGNALS, *SAVE_SIGNALS)
    heard = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in heard}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _unnamed_file(label: str, text: str = "") -> Iterator[int]:
    """Descriptor of a file in memory, for the ranks.

    It has no name anywhere, so nothing of it is left, however its processes end.
    """
    descriptor = os.memfd_create(label)
    try:
        os.write(descriptor, text.encode())
        yield descriptor
    finally:
        os.close(descriptor)


def _start_rank(
    command: Sequence[str], rank: int, world_size: int, passed: Sequence[int], logs: Path
) -> subprocess.Popen[bytes]:
    """One rank in a session of its own, so that Ctrl-C reaches the launcher alone.

    The first file that is `passed` is where the ranks meet.
    """
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        RENDEZVOUS_VARIABLE: f"file:///proc/self/fd/{passed[0]}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    console = contextlib.nullcontext()
    with console if rank == 0 else _log_of(logs, rank).open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            pass_fds=passed,
            start_new_session=True,
            preexec_fn=partial(_die_with, os.getpid()),
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
        )


_C_LIBRARY = ctypes.CDLL(None)


def _die_with(launcher: int) -> None:
    """Between fork and exec of a rank: SIGKILL when the launcher ends without stopping it.

    Until the rank listens to the signals that ask to save, they wait. What a killed rank 0 leaves
    (engines, sockets, shared memory) its engines' guardians remove.
    """
    _C_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, SAVE_SIGNALS)
    if os.getppid() != launcher:
        os._exit(1)


def _log_of(logs: Path, rank: int) -> Path:
    return logs / f"trainer_rank{rank}.log"


def _watch(ranks: list[subprocess.Popen[bytes]], logs: Path, stopped: list[int]) -> int:
    """Wait until all ranks are done, one fails, or a signal asks to stop."""
    while True:
        while stopped:
            number = stopped.pop(0)
            if number not in SAVE_SIGNALS:
                _stop(ranks)
                return 128 + number
            _ask_to_save(ranks)
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            if EXIT_PREEMPTED in codes:  # before the ranks met, one cannot tell the others
                _ask_to_save(ranks)
            codes = _settled(ranks, stopped)
            return _report_failure(_first_cause(codes), codes, logs)
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_SECONDS)


def _ask_to_save(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        process.send_signal(signal.SIGUSR1)


def _settled(ranks: list[subprocess.Popen[bytes]], stopped: list[int]) -> list[int | None]:
    """Exit codes after a moment in which ranks that fail together end by themselves.

    The rank that failed first still closes its engines when its peers end over the lost connection.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline and not stopped:
        if all(process.poll() is not None for process in ranks):
            break
        time.sleep(POLL_SECONDS)
    return [process.poll() for process in ranks]


def _first_cause(codes: Sequence[int | None]) -> int:
    """The rank that explains a failure best: one that chose its exit code, then one that was
    killed (not one that aborted, as ranks do whose peer is lost), then the lowest."""

    def order(rank: int) -> tuple[bool, bool, int]:
        code = codes[rank] or 0
        chosen = code in (EXIT_PREEMPTED, EXIT_CONFIG)
        killed = code < 0 and code != -signal.SIGABRT
        return not chosen, not killed, rank

    return min((rank for rank, code in enumerate(codes) if code not in (None, 0)), key=order)


def _report_failure(rank: int, codes: list[int | None], logs: Path) -> int:
    code = codes[rank]
    assert code is not None, f"rank {rank} has not ended"
    if code == EXIT_PREEMPTED:
        sys.stderr.write("saved and stopped; the same command goes on from there\n")
        return code
    if code < 0:
        sys.stderr.write(f"trainer rank {rank} was ended by {signal.Signals(-code).name}\n")
        code = 128 - code
    else:
        sys.stderr.write(f"trainer rank {rank} ended with exit code {code}\n")
    if rank > 0:
        lines = _log_of(logs, rank).read_text(errors="replace").splitlines()
        sys.stderr.write("\n".join(lines[-TAIL_LINES:]) + "\n")
    return code


def _stop(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs: SIGINT, then after the grace time SIGKILL, whole sessions."""
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
    for process in ranks:  # also helpers of ranks that ended by themselves
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
