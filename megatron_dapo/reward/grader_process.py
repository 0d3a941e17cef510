"""The parent's end of one grader worker: start it, ask it, end it with all that it started."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_dapo.config.errors import RunFailed
from megatron_dapo.config.schema import RewardConfig

WORKER = Path(__file__).with_name("grader_worker.py")
KEPT_NAMES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Environment variables of this process that a worker gets, besides `plugin_environment`."""
STARTUP_SECONDS = 120.0
"""Longest import of a plug-in."""
LARGEST_REPLY = 1 << 20
"""Bytes of a reply that are read."""
EXIT_SECONDS = 5.0
"""Between the end of a connection and that of its process, on a machine that is very busy."""
FREEZE_ROUNDS = 100

Value = bool | dict[str, float]
Failure = Literal["time_limit", "memory_limit", "died", "raised"]


class GraderStartError(RunFailed):
    """A worker ended before it was ready, or took too long."""


@dataclass(frozen=True, slots=True)
class GraderReply:
    """What became of one call: a value, or the reason why there is none."""

    value: Value | None = None
    failure: Failure | None = None
    error: str = ""
    traceback: str = ""


class GraderProcess:
    """One worker. Not for several threads at once.

    The kernel ends the worker when the thread that made it ends.

    Args:
        config: what to import, and the limits.
        directory: where it runs.
        log_file: gets what the worker writes to standard output and error; None: nowhere.

    Raises:
        GraderStartError: no process can be started there.
    """

    def __init__(self, config: RewardConfig, directory: Path, log_file: Path | None) -> None:
        self._config = config
        self._jobs = 0
        self._buffer = bytearray()
        self._ending_lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        try:
            with theirs, (log_file or Path(os.devnull)).open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-P", str(WORKER), "--parent", str(os.getpid())],
                    stdin=theirs.fileno(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=directory,
                    env=worker_environment(config, directory, os.environ),
                    start_new_session=True,
                )
        except OSError as error:
            self._socket.close()
            raise GraderStartError(f"a grader worker cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._ended_status() is None

    def wait_ready(self) -> bool:
        """Block until everything is imported; True where the network is cut off, as asked.

        Raises:
            ValueError: the plug-in, or math-verify, cannot be used; the message says why.
            GraderStartError: the worker ended, or took too long.
        """
        setup = {
            "plugin": self._config.plugin,
            "network": self._config.plugin_network,
            "cpu_seconds": self._config.cpu_limit_seconds,
            "memory_mib": self._config.memory_limit_mib,
            "path": [os.path.abspath(entry) for entry in sys.path],
        }
        try:
            reply = self._exchange(setup, STARTUP_SECONDS)
        except (OSError, ValueError) as error:
            raise GraderStartError(
                f"a grader worker did not get ready ({self._ending(EXIT_SECONDS) or error})"
            ) from error
        if "error" in reply:
            raise ValueError(self._import_problem(reply))
        return bool(reply["isolated"])

    def _import_problem(self, reply: Mapping[str, object]) -> str:
        error = str(reply["error"]).removeprefix("ValueError: ")
        if error.startswith("reward."):
            return error
        plugin = self._config.plugin
        return f"reward.plugin={plugin!r}: its import failed:\n{reply['traceback']}"

    def ask(self, job: Mapping[str, object]) -> GraderReply:
        """Reply to one job, within `time_limit_seconds`. After a failure other than "raised" this
        worker must be ended."""
        limit = self._config.time_limit_seconds
        try:
            reply = self._exchange(job, limit)
        except TimeoutError:
            return GraderReply(failure="time_limit", error=f"took longer than {limit:g} s")
        except (OSError, ValueError) as error:
            ending = self._ending(EXIT_SECONDS if isinstance(error, OSError) else 0.0)
            failure: Failure = "time_limit" if "SIGXCPU" in ending else "died"
            return GraderReply(failure=failure, error=ending or str(error))
        if "error" in reply:
            return GraderReply(
                failure="memory_limit" if reply.get("out_of_memory") is True else "raised",
                error=str(reply["error"]),
                traceback=str(reply.get("traceback", "")),
            )
        value = reply.get("value")
        if isinstance(value, bool):
            return GraderReply(value)
        if isinstance(value, dict) and value and all(_is_number(v) for v in value.values()):
            return GraderReply(value)
        return GraderReply(failure="died", error="sent something else than a reply")

    def end(self) -> None:
        """Kill the worker and every process that its calls left; ending twice does nothing."""
        with self._ending_lock:
            if self._process.returncode is None:  # not reaped, so its number is still its own
                self._socket.close()
                end_family(self.pid)
                self._process.wait()

    def _exchange(self, message: Mapping[str, object], seconds: float) -> dict[str, object]:
        """Send one message and read the line that answers it.

        Raises:
            TimeoutError: not within `seconds`, all together.
            OSError: the worker closed its end.
            ValueError: what came is no reply to this message.
        """
        deadline = time.monotonic() + seconds
        self._jobs += 1
        self._socket.settimeout(seconds)
        self._socket.sendall(json.dumps({**message, "id": self._jobs}).encode() + b"\n")
        while b"\n" not in self._buffer:
            if len(self._buffer) > LARGEST_REPLY:
                raise ValueError(f"a reply of more than {LARGEST_REPLY} bytes")
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-6))
            chunk = self._socket.recv(65536)
            if not chunk:
                raise ConnectionResetError("it closed the connection")
            self._buffer += chunk
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        try:
            reply = json.loads(line)
        except RecursionError as error:
            raise ValueError("a reply that is nested too deeply") from error
        if not isinstance(reply, dict) or reply.get("id") != self._jobs:
            raise ValueError("sent something else than a reply")
        return reply

    def _ending(self, seconds: float) -> str:
        """How the worker ended, in words; "" where it still lives after `seconds`."""
        deadline = time.monotonic() + seconds
        while (ended := self._ended_status()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if ended is None:
            return ""
        code, status = ended
        exited = code == os.CLD_EXITED
        return f"ended with code {status}" if exited else f"ended by {signal.Signals(status).name}"

    def _ended_status(self) -> tuple[int, int] | None:
        """How the worker ended, by waitid; None while it lives. Does not reap it."""
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped by `end`
            return os.CLD_KILLED, signal.SIGKILL
        return None if found is None else (found.si_code, found.si_status)


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)  # a worker sends no int


def worker_environment(
    config: RewardConfig, directory: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Environment of a worker: a short list of names, so that no secret is in it."""
    names = (*KEPT_NAMES, *config.plugin_environment)
    kept = {name: inherited[name] for name in names if name in inherited}
    return {"HOME": str(directory), "OMP_NUM_THREADS": "1"} | kept


def end_family(pid: int) -> None:
    """SIGKILL all of a worker's processes: below it, or in its session once it is dead.

    They are stopped first: a process that forks without end cannot outrun that.
    """
    for _ in range(FREEZE_ROUNDS):
        running = [member for member, state in _family(pid) if state != "T"]
        if not running:
            break
        _signal_all(running, signal.SIGSTOP)
        time.sleep(0.001)
    for own in (False, True):  # the worker last: while it is there, nothing below it gets lost
        _signal_all([m for m, _ in _family(pid) if (m == pid) is own], signal.SIGKILL)


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _family(root: int) -> list[tuple[int, str]]:
    """(process id, state) of `root`, what descends from it and its session; no zombies."""
    parents: dict[int, int] = {}
    states: dict[int, str] = {}
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
                pid = int(entry)
                states[pid], parents[pid] = fields[0].decode(), int(fields[1])
                if pid == root or int(fields[3]) == root:
                    found.add(pid)
    grown = True
    while grown:
        below = {pid for pid, parent in parents.items() if parent in found}
        grown = not below <= found
        found |= below
    return [(pid, states[pid]) for pid in found if states[pid] not in "ZX"]
