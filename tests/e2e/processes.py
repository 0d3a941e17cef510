"""A training command that is interrupted, and everything on the machine that belongs to it.

Every process of a run inherits a mark in its environment, so that none can hide by leaving its
session or its parent.
"""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_dapo.observability.run_files import METRICS_FILE
from tests.e2e.rewards import GRADED_FILE
from tests.e2e.runs import Start, command_environment, command_line

MARK = "MEGATRON_DAPO_TEST_MARK"
SHARED_MEMORY = Path("/dev/shm")
PATIENCE_SECONDS = 1200.0
CLEAN_UP_SECONDS = 120.0


@dataclass
class RunningTrain:
    """`megatron-dapo train` while it runs."""

    folder: Path
    process: subprocess.Popen[str]
    mark: str
    graded: Path
    seen: set[Path] = field(default_factory=set)
    """Sockets, temporary folders and shared memory that its processes used so far."""

    @property
    def engine_log(self) -> Path:
        return self.folder / "logs" / "rollout_engine_0.log"

    @property
    def metrics_file(self) -> Path:
        return self.folder / METRICS_FILE

    def responses_graded(self) -> int:
        return self.graded.stat().st_size if self.graded.exists() else 0

    def wait_for(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not done():
            assert self.process.poll() is None, f"ended before {what}: {self.output()}"
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Live processes with the mark of this run, wherever they are now."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def rank(self, number: int) -> psutil.Process:
        (found,) = (
            process
            for process in self.processes()
            if process.environ().get("RANK") == str(number)
            and "megatron_dapo.train" in process.cmdline()
        )
        return found

    def engine(self) -> list[psutil.Process]:
        """The guardian of the engine, the server, and its workers, parents first."""
        (guardian,) = (
            process
            for process in self.processes()
            if any(word.endswith("server_main.py") for word in process.cmdline())
        )
        return [guardian, *guardian.children(recursive=True)]

    def note_files(self) -> None:
        """Remember what the run's processes hold outside of its own folder."""
        for process in self.processes():
            try:
                paths = [entry.path for entry in process.memory_maps()]
                paths += [entry.path for entry in process.open_files()]
                paths += [entry.laddr for entry in process.net_connections("unix") if entry.laddr]
                paths += process.environ().values()
            except psutil.Error:  # it just ended
                continue
            self.seen |= {Path(path) for path in paths if _is_scratch(path)}

    def remains(self) -> list[str]:
        """Processes, files and folders that are left."""
        files = {path for path in self.seen if path.exists()}
        return [*map(str, self.processes()), *map(str, sorted(files))]

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + CLEAN_UP_SECONDS
        while self.remains() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.remains() == []

    def finish(self) -> str:
        """Wait for its end, which must be a good one and leave nothing; what it wrote."""
        while self.process.poll() is None:
            self.note_files()
            time.sleep(0.2)
        output = self.output()
        assert self.process.returncode == 0, output
        self.wait_until_gone()
        return output

    def output(self) -> str:
        """What the command wrote; call it once, after its end."""
        return "".join(text or "" for text in self.process.communicate())

    def close(self) -> None:
        """End what a failed test leaves running."""
        for process in self.processes():
            process.kill()
        self.process.communicate()

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return (
                process.environ().get(MARK) == self.mark
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False


def _is_scratch(path: str) -> bool:
    """Under /dev/shm, or one of our folders in /tmp; deleted files do not count."""
    in_memory = Path(path).is_relative_to(SHARED_MEMORY) and Path(path) != SHARED_MEMORY
    return path.startswith("/tmp/megatron_dapo_") or (in_memory and Path(path).exists())


def start_train(
    start: Start, name: str, *overrides: str, environment: Mapping[str, str] | None = None
) -> RunningTrain:
    """Start a run in its own directory beside the start, and return at once."""
    folder = start.folder / name
    arguments = ("train", start.file, f"run_dir={folder}", *overrides)
    graded = start.folder / f"{name}.graded"
    return start_command(*arguments, folder=folder, graded=graded, environment=environment)


def start_command(
    *arguments: object,
    folder: Path,
    graded: Path,
    environment: Mapping[str, str] | None = None,
) -> RunningTrain:
    """Start a command that writes into `folder`, in a session of its own, and return at once."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command_line(*arguments),
        env=command_environment({MARK: mark, GRADED_FILE: str(graded)} | dict(environment or {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.pid != os.getpid()
    return RunningTrain(folder, process, mark, graded)
