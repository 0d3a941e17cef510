"""The trainer's end of W&B: a process that is told when there is something to send."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import megatron_dapo
from megatron_dapo.config import RunConfig
from megatron_dapo.config.redact import names_a_secret, redact
from megatron_dapo.config.versions import is_installed
from megatron_dapo.observability import wandb_process
from megatron_dapo.observability.run_files import read_run_record, write_run_record
from megatron_dapo.observability.wandb_process import (
    WANDB_FOLDER,
    Sent,
    descendants,
    how_to_send,
)

logger = logging.getLogger(__name__)

LOG_FILE = Path("logs") / "wandb.log"
ANSWER_SECONDS = 30.0
"""Without an answer of the service in this time the run is recorded on disk instead."""
UPLOAD_SECONDS = 30.0
"""For what has not been uploaded at the end of a run; the rest is left to `wandb sync`."""
MOST_STARTS = 5
"""Of W&B's process in one start of the run."""
FINISH_SECONDS = 60.0
"""What W&B gets to take everything at the end of a run."""
STOP_SECONDS = 10.0
"""The same when a run stops before: it is asked to leave soon."""
OFFLINE_SECONDS = 30.0
"""To record on disk what a process that ended or hung did not send."""
HELD = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP})
"""Signals that a job's processes all get, and that do not end a run at once."""


class WandbSink:
    """A W&B run whose id is kept in run.json, so that a resumed run goes on in the same one.

    What is sent is read from metrics.jsonl and samples.jsonl by a process of its own
    (`wandb_process`), which may hang, die or be killed: nothing here waits for it but `close`.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, options: Mapping[str, object]) -> None:
        self._run_dir = run_dir
        self._options = options
        self._starts = 0
        self._scratch = tempfile.TemporaryDirectory(
            prefix="megatron_dapo_wandb_", ignore_cleanup_errors=True
        )
        try:
            self._process = self._start(options)
        except OSError:
            self._scratch.cleanup()
            raise

    @classmethod
    def open(cls, config: RunConfig) -> WandbSink:
        """Start or continue the run. The key comes from the environment or netrc, never from us.

        Raises:
            ImportError: wandb is not installed.
            OSError: its process cannot be started.
        """
        if not is_installed("wandb"):
            raise ImportError("wandb is not installed")
        record = read_run_record(config.run_dir)
        run_id = record.get("wandb_id") or secrets.token_hex(4)
        write_run_record(config.run_dir, {**record, "wandb_id": run_id})
        options = {
            "project": config.logging.wandb_project,
            "name": config.run_dir.name,
            "id": run_id,
            "config": redact(config.model_dump(mode="json")),
        }
        return cls(config.run_dir, options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._look()

    def log_samples(self, step: int, rows: list[dict[str, object]]) -> None:
        self._look()

    def close(self, *, complete: bool) -> None:
        """Let W&B take everything, for a limited time, then end it with all that it has started.

        What it has not taken of a run that stops, the next start sends; of one that is complete,
        it is recorded on disk.
        """
        with self._scratch:
            self._close(complete)

    def _close(self, complete: bool) -> None:
        seconds = FINISH_SECONDS if complete else STOP_SECONDS
        if self._ends(seconds):
            return
        sent = Sent.read(self._run_dir)
        logger.warning(
            "W&B was ended: it did not take everything within %g s, or had failed before; see %s",
            seconds,
            self._run_dir / LOG_FILE,
        )
        if sent.folder and not sent.folder.startswith("offline"):
            logger.warning("%s", how_to_send(self._run_dir / WANDB_FOLDER / sent.folder))
        if complete:
            self._process = self._start({**self._options, "mode": "offline"})
            if not self._ends(OFFLINE_SECONDS):
                logger.warning("W&B lacks steps after %d: metrics.jsonl has them", sent.step)

    def _look(self) -> None:
        """Say that the files have grown.

        Raises:
            OSError: W&B's process has ended. It was started again, unless that happens too often.
        """
        code = self._process.poll()
        if code is None:
            with contextlib.suppress(BrokenPipeError):  # it ends just now: the next look says so
                pipe(self._process).write(b"+")  # a full pipe takes nothing, and has said enough
            return
        ended = f"W&B's process ended with code {code}; see {self._run_dir / LOG_FILE}"
        if self._starts == MOST_STARTS:
            raise OSError(f"{ended}. It is not started again")
        self._process = self._start(self._options)
        raise OSError(f"{ended}. It was started again and sends what is missing")

    def _ends(self, seconds: float) -> bool:
        """End its input; True where the process then ends well in time."""
        pipe(self._process).close()
        try:
            return self._process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            for pid in (self._process.pid, *descendants(self._process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            return False

    def _start(self, options: Mapping[str, object]) -> subprocess.Popen[bytes]:
        """Start W&B's process. It and what it starts inherit `HELD` as blocked."""
        self._starts += 1
        log = self._run_dir / LOG_FILE
        log.parent.mkdir(parents=True, exist_ok=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", wandb_process.__name__, str(self._run_dir)],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    env=wandb_environment(os.environ, self._run_dir)
                    | {"TMPDIR": self._scratch.name},
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.set_blocking(pipe(process).fileno(), False)
        limits = {"answer_seconds": ANSWER_SECONDS, "upload_seconds": UPLOAD_SECONDS}
        line = json.dumps({"run": options, **limits}).encode() + b"\n"
        if pipe(process).write(line) != len(line):
            raise OSError(f"the configuration, {len(line)} bytes, is too long for W&B's process")
        return process


def pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
    """Its standard input."""
    assert process.stdin is not None, "W&B's process is asked through its input"
    return process.stdin


def wandb_environment(inherited: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """Environment of W&B's process: its own key and no other secret; it writes below run_dir."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name != "WANDB_SERVICE" and (name.startswith("WANDB_") or not names_a_secret(name))
    }
    root = str(Path(megatron_dapo.__file__).resolve().parents[1])
    folder = (run_dir / WANDB_FOLDER).resolve()
    defaults = {
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "data"),
        "WANDB_ERROR_REPORTING": "false",
    }
    paths = [root, *filter(None, [inherited.get("PYTHONPATH")])]
    return defaults | kept | {"PYTHONPATH": os.pathsep.join(paths)}
