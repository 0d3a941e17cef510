"""Guardian of one engine: starts the server given on its command line and outlives nobody.

Run as a script by `VllmServer`, in a session of its own. Whatever ends first - the server, the
trainer, or the trainer's patience - every process of the session is ended and the private
directories are removed. Standard library only, so that it starts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_DIED = signal.SIGUSR1
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
WATCHED = STOP_SIGNALS | {signal.SIGCHLD, PARENT_DIED}
ORPHANS_FILE = "remove_when_orphaned"
"""In the scratch directory: directories of the trainer that go only if it died, one a line."""
POLL_SECONDS = 1.0
LEFT_BEHIND_SECONDS = 2.0
"""What other processes of the session get once the server itself has ended."""
SHARED_MEMORY = Path("/dev/shm")
SCRATCH_PREFIXES = ("psm_", "sem.mp-", "torch_", "vllm_")
"""Names that Python, torch and vLLM give to shared memory; other files are left alone."""


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _enter_server() -> None:
    """Between fork and exec of the server: a normal signal mask, and no life after the guardian."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    signal.signal(PARENT_DIED, signal.SIG_IGN)  # SLURM sends it to every process of a step
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """Live processes of `session`; zombies do not count."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX" and int(fields[3]) == session:
                members.append(int(stat.parent.name))
    return members


def mapped_scratch(members: list[int]) -> set[Path]:
    """Shared memory that these processes map and that none of them removes after a SIGKILL."""
    found = set()
    for pid in members:
        with contextlib.suppress(OSError):
            for line in Path("/proc", str(pid), "maps").read_text().splitlines():
                path = Path(line.rpartition(" ")[2])
                if path.parent == SHARED_MEMORY and path.name.startswith(SCRATCH_PREFIXES):
                    found.add(path)
    return found


def _others() -> list[int]:
    """Processes of this session beside this one."""
    return [pid for pid in session_members(os.getsid(0)) if pid != os.getpid()]


def _reap(server: subprocess.Popen[bytes]) -> None:
    """Collect dead children; grandchildren come here because this process is the subreaper."""
    server.poll()
    with contextlib.suppress(ChildProcessError):
        while server.returncode is not None and os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_session(server: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Ask the server to stop, wait, then kill what is left of the session."""
    scratch = mapped_scratch(_others())
    if server.poll() is None:
        server.terminate()
    deadline = time.monotonic() + grace_seconds
    while _others() and time.monotonic() < deadline:
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap(server)
        if server.returncode is not None:
            deadline = min(deadline, time.monotonic() + LEFT_BEHIND_SECONDS)
    while members := _others():
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap(server)
    for path in scratch:
        path.unlink(missing_ok=True)


def _wait(server: subprocess.Popen[bytes], parent: int) -> bool:
    """Until the server ends, the parent ends or a stop is asked for; True: the parent is gone."""
    while True:
        received = signal.sigtimedwait(WATCHED, POLL_SECONDS)
        _reap(server)
        if os.getppid() != parent:  # PARENT_DIED also comes when only the starting thread ends
            return True
        asked = received is not None and received.si_signo in STOP_SIGNALS
        if asked or server.returncode is not None:
            return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process that must be alive")
    parser.add_argument("--grace-seconds", type=float, default=10.0)
    parser.add_argument("--scratch", type=Path, required=True, help="directory to remove at end")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()

    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, PARENT_DIED)
    orphaned, returncode = os.getppid() != options.parent, 1
    if not orphaned:
        server = subprocess.Popen(options.command, preexec_fn=_enter_server)
        orphaned = _wait(server, options.parent)
        _end_session(server, options.grace_seconds)
        returncode = server.wait()
    orphans = options.scratch / ORPHANS_FILE
    removed = orphans.read_text().splitlines() if orphaned and orphans.exists() else []
    for folder in [*removed, options.scratch]:
        shutil.rmtree(folder, ignore_errors=True)
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(main())
