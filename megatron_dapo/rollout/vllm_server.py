"""A stock vLLM server as a child process that listens on a private unix socket only."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from megatron_dapo.config.errors import RunFailed
from megatron_dapo.rollout.log_causes import causes
from megatron_dapo.rollout.server_main import ORPHANS_FILE, mapped_scratch, session_members
from megatron_dapo.rollout.server_options import (
    ServerOptions,
    server_command,
    server_environment,
)

logger = logging.getLogger(__name__)

GUARDIAN = Path(__file__).with_name("server_main.py")
LONGEST_SOCKET_PATH = 107
"""Bytes of sun_path, without the closing zero."""
LOG_TAIL_LINES = 30
MOST_LOG_BYTES = 1 << 22
"""Of a log that are read for that, from its end."""
GRACE_SECONDS = 10.0
"""What a server gets to end by itself; vLLM needs about one."""
POLL_SECONDS = 0.25
FIRST_SIGNAL_CODE = 128
"""The guardian's exit code less this: the signal that ended the server."""


class EngineStartError(RunFailed):
    """The server ended, or was not ready in time. The message carries its last log lines."""


class VllmServer:
    """One server process with everything that belongs to it.

    The process that calls `start` owns it: when that process ends, in whatever way, a guardian
    (`server_main.py`) ends the server's processes and removes its files.

    Args:
        options: how to start.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._guardian: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._owner = os.getpid()
        self._log_start = 0
        self._deadline = 0.0
        self._oom_kills = 0
        self._mapped: set[Path] = set()
        """Shared memory of the server once it was ready; for when all of it is killed at once."""

    @property
    def name(self) -> str:
        return f"rollout engine {self.options.index}"

    @property
    def label(self) -> str:
        """What messages call it: its name, and where to read on."""
        return f"{self.name} (log in {self.options.log_file})"

    @property
    def endpoint(self) -> str:
        """Address for `VllmEngine`; valid from `start` to `stop`."""
        address = self.options.address
        if address is not None:
            return f"http://{address.host}:{address.port}"
        return f"unix:{self._socket()}"

    @property
    def pid(self) -> int | None:
        """The guardian's process id, which is also the id of the server's session."""
        return None if self._guardian is None else self._guardian.pid

    @property
    def alive(self) -> bool:
        return self._guardian is not None and self._guardian.poll() is None

    def start(self) -> None:
        """Start the process; returns at once. Call `wait_ready` before the first request."""
        if self._guardian is not None:
            raise RuntimeError(f"{self.name} was already started; stop it first")
        self._owner = os.getpid()
        # Not in TMPDIR: the path of a socket must stay short.
        self._scratch = Path(tempfile.mkdtemp(prefix="megatron_dapo_", dir="/tmp"))
        log_file = self.options.log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._log_start = log.tell()
            self._guardian = subprocess.Popen(
                self._guardian_command(),
                env=server_environment(self.options, self._scratch, os.environ),
                cwd=self._scratch,  # `python -m` imports from here first: nothing may be in the way
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._oom_kills = oom_kills()
        self._deadline = time.monotonic() + self.options.startup_timeout_seconds
        atexit.register(self.stop)
        logger.info("%s starts, log in %s", self.name, log_file)

    def wait_ready(self) -> None:
        """Block until the server answers.

        Raises:
            EngineStartError: it ended or took longer than `startup_timeout_seconds` since `start`.
        """
        socket = str(self._socket())
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket), timeout=5.0) as client:
            while not self._healthy(client):
                if not self.alive:
                    raise self._start_error(f"ended before it was ready ({self.exit_reason()})")
                if time.monotonic() > self._deadline:
                    limit = self.options.startup_timeout_seconds
                    raise self._start_error(
                        f"was not ready after rollout.startup_timeout_seconds={limit:g}"
                    )
                time.sleep(POLL_SECONDS)
        if self._guardian is not None:
            self._mapped = mapped_scratch(session_members(self._guardian.pid))
        logger.info("%s is ready", self.name)

    def stop(self) -> None:
        """End the server's processes and remove its files; does nothing when already stopped."""
        if self._guardian is None or os.getpid() != self._owner:
            return
        guardian, self._guardian = self._guardian, None
        atexit.unregister(self.stop)
        if guardian.poll() is None:
            guardian.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                guardian.wait(2 * GRACE_SECONDS)
        self._clear(guardian)

    def kill(self) -> None:
        """SIGKILL for everything of the server, and no file of it left; for one that hangs.

        A stopped process heeds nothing else. Does nothing when already stopped.
        """
        if self._guardian is None or os.getpid() != self._owner:
            return
        guardian, self._guardian = self._guardian, None
        atexit.unregister(self.stop)
        self._mapped |= mapped_scratch(session_members(guardian.pid))
        self._clear(guardian)

    def _clear(self, guardian: subprocess.Popen[bytes]) -> None:
        """Nothing of the server is left, whatever its guardian still did."""
        kill_session(guardian.pid)
        if guardian.wait() < 0:  # it was killed itself
            for path in self._mapped:
                path.unlink(missing_ok=True)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def exit_reason(self) -> str:
        """How the server ended; "" while it runs."""
        code = None if self._guardian is None else self._guardian.poll()
        if code is None:
            return ""
        number = -code if code < 0 else code - FIRST_SIGNAL_CODE
        if 0 < number < signal.NSIG:
            reason = f"ended by {signal.Signals(number).name}"
        else:
            reason = f"ended with exit code {code}"
        if (killed := oom_kills() - self._oom_kills) > 0:
            reason += (
                f"; the kernel's out-of-memory killer has ended {killed} processes on this machine "
                "since it started, perhaps this one: leave it more memory"
            )
        return reason

    def remove_when_orphaned(self, directory: Path) -> None:
        """Have the guardian remove `directory` (published weights) should the owner be killed."""
        if self._scratch is None:
            raise RuntimeError(f"{self.name} was not started")
        listed = self._scratch / ORPHANS_FILE
        listed.write_text(f"{directory}\n")

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines that this server wrote, then the exceptions that began its end."""
        try:
            with self.options.log_file.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - MOST_LOG_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:  # somebody cleared it away: no reason to end a run
            return f"({self.options.log_file} is not there any more)"
        tail = "\n".join(text.splitlines()[-lines:])
        found = "\n".join(causes(text))
        return f"{tail}\nCause, as its log names it:\n{found}" if found else tail

    def _guardian_command(self) -> list[str]:
        command = [sys.executable, "-P", str(GUARDIAN), "--parent", str(os.getpid())]
        command += ["--scratch", str(self._scratch), "--grace-seconds", str(GRACE_SECONDS)]
        return [*command, "--", *server_command(self.options, self._socket())]

    def _socket(self) -> Path:
        if self._scratch is None:
            raise RuntimeError(f"{self.name} was not started")
        socket = self._scratch / "http"
        if len(os.fsencode(socket)) > LONGEST_SOCKET_PATH:
            raise RuntimeError(f"socket path {socket} is longer than {LONGEST_SOCKET_PATH} bytes")
        return socket

    def _healthy(self, client: httpx.Client) -> bool:
        try:
            return client.get("http://engine/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _start_error(self, what: str) -> EngineStartError:
        tail = self.log_tail()
        self.stop()
        return EngineStartError(
            f"{self.name} {what}. Last lines of {self.options.log_file}:\n{tail}"
        )


def kill_session(session: int) -> None:
    """SIGKILL every process of `session`, again until none is left."""
    while members := session_members(session):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def oom_kills() -> int:
    """Processes that the kernel ended for want of memory, on this machine since it started."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0
