"""One run in a run directory: a file that names its owner, and beats while the owner lives.

It works wherever the directory is, also where kernel locks do not reach: a dead owner of this
machine is known by its process, one of another machine by a heart that stands still. Clocks of two
machines are never compared.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_dapo.config import ConfigError
from megatron_dapo.config.errors import RunFailed

logger = logging.getLogger(__name__)

OWNER_FILE = "owner.json"
TAKEOVER_FILE = "owner.takeover"
BEAT_SECONDS = 10.0
STALE_SECONDS = 90.0
"""A heart that stood still for so long is dead."""


@dataclass(frozen=True)
class Owner:
    """A process that trains in a run directory."""

    host: str
    place: str
    """Boot and process namespace: where `pid` means something."""
    pid: int
    started: int
    """Clock ticks from boot to its start: a process id is used again."""
    job: str
    """SLURM job id; empty without."""
    restarts: int
    """Times that SLURM requeued the job."""
    token: str

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Self:
        """This process."""
        return cls(
            host=socket.gethostname(),
            place=_place(),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
            job=environ.get("SLURM_JOB_ID", ""),
            restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
            token=uuid.uuid4().hex,
        )

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


class RunLock:
    """Held by global rank 0 from before anything is written to the run directory to the end.

    Args:
        run_dir: made if it is missing.
        environ: names the SLURM job.

    Raises:
        ConfigError: from `acquire`: another run lives in it, or it cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        environ: Mapping[str, str],
        *,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self._run_dir = run_dir
        self._path = run_dir / OWNER_FILE
        self._takeover = run_dir / TAKEOVER_FILE
        self._owner = Owner.here(environ)
        self._beat_seconds = beat_seconds
        self._stale_seconds = stale_seconds
        self._released = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Own the directory; a dead owner is replaced, which may take `stale_seconds`."""
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._bury()
        except OSError as error:
            raise ConfigError(
                f"run_dir={self._run_dir} cannot be written: {error}. Name a directory that can"
            ) from error
        self._heart = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._heart.start()

    def require_held(self) -> None:
        """Before a write that another run must not see.

        Raises:
            RuntimeError: this process stood still for so long that another took the directory.
        """
        owner = _read(self._path)
        if owner is None or owner.token != self._owner.token:
            raise RunFailed(
                f"{self._run_dir} was taken over by {owner or 'nobody that is known'} while "
                f"{self._owner} stood still: nothing more is written to it"
            )

    def release(self) -> None:
        """Give the directory up, where it still is ours."""
        self._released.set()
        if self._heart is not None:
            self._heart.join()
        owner = _read(self._path)
        if owner is not None and owner.token == self._owner.token:
            self._path.unlink(missing_ok=True)

    def _create(self) -> bool:
        try:
            file = self._path.open("x")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(json.dumps(asdict(self._owner)))
        except OSError:  # a file without an owner would hold up the next start
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _bury(self) -> None:
        """Remove the file of an owner that is dead.

        Raises:
            ConfigError: it lives.
        """
        beat, owner = _beat_of(self._path), _read(self._path)
        if beat is None:
            return  # it has just given the directory up
        if not (owner is not None and self._is_dead(owner)):
            self._watch(beat)
        logger.warning("%s is taken over from %s, which is dead", self._run_dir, owner or "a run")
        with _Takeover(self._takeover, self._stale_seconds):
            if _read(self._path) == owner:
                self._path.unlink(missing_ok=True)

    def _is_dead(self, owner: Owner) -> bool:
        """True where that is known without waiting.

        Raises:
            ConfigError: it is known to live.
        """
        ours = self._owner
        if owner.place == ours.place:
            if _started(owner.pid) == owner.started:
                raise self._refusal(str(owner))
            return True
        return bool(owner.job) and owner.job == ours.job and owner.restarts < ours.restarts

    def _watch(self, beat: tuple[int, bytes]) -> None:
        """Wait until the heart has stood still long enough.

        Raises:
            ConfigError: it beats.
        """
        logger.warning("%s has an owner elsewhere: waiting for its heartbeat", self._run_dir)
        deadline = time.monotonic() + self._stale_seconds
        while time.monotonic() < deadline:
            time.sleep(self._beat_seconds / 5)
            now = _beat_of(self._path)
            if now is None:
                return
            if now != beat:
                raise self._refusal(str(_read(self._path)))

    def _refusal(self, owner: str) -> ConfigError:
        return ConfigError(
            f"run_dir={self._run_dir}: another run is going on in it: {owner}. Wait for it or stop "
            "it, or choose another run_dir."
        )

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            try:
                owner = _read(self._path)
                if owner is None or owner.token != self._owner.token:
                    return  # `require_held` says it
                os.utime(self._path)
            except OSError as error:
                logger.warning("the heartbeat of %s fails: %s", self._run_dir, error)


class _Takeover:
    """Only one process buries at a time; who dies over it is not waited for long."""

    def __init__(self, path: Path, stale_seconds: float) -> None:
        self._path = path
        self._stale_seconds = stale_seconds

    def __enter__(self) -> None:
        deadline = time.monotonic() + self._stale_seconds
        while True:
            try:
                self._path.open("x").close()
                return
            except FileExistsError:
                if time.monotonic() > deadline:
                    self._path.unlink(missing_ok=True)
                time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)


def _read(path: Path) -> Owner | None:
    """The owner that the file names; None without one, or while it is half written."""
    try:
        return Owner(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _beat_of(path: Path) -> tuple[int, bytes] | None:
    """What changes with every beat; opening the file makes network file systems look again."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
