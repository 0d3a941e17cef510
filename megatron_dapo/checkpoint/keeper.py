"""The checkpoints of a run: written in step or in the background, and what a failure means."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch.distributed import ProcessGroup

from megatron_dapo import device
from megatron_dapo.checkpoint.header import Score
from megatron_dapo.checkpoint.retention import score_of
from megatron_dapo.checkpoint.run_lock import RunLock
from megatron_dapo.checkpoint.save import CheckpointError, StagedSave, write_save
from megatron_dapo.checkpoint.state import (
    Critic,
    Restored,
    holds_optimizer,
    load_checkpoint,
    stage_save,
)
from megatron_dapo.config.checkpoint import CheckpointConfig
from megatron_dapo.parallel.context import ParallelContext

device.install_cpu_support()

from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer.optimizer import ChainedOptimizer  # noqa: E402

logger = logging.getLogger(__name__)

WRITERS_TIMEOUT = timedelta(hours=6)
"""Longest wait of one rank's writer for the others': a rank that died is noticed at once."""
LEAVE_SECONDS = 10.0
"""What a save that is under way gets when the run ends by an error."""


@dataclass
class CheckpointKeeper:
    """Saves and restores one run's models. Collective, but for `close`."""

    folder: Path
    settings: CheckpointConfig
    parallel: ParallelContext
    chunks: Sequence[GPTModel]
    optimizer: ChainedOptimizer
    critic: Critic | None = None
    constants: Mapping[str, JsonValue] = field(default_factory=dict)
    """States by name that every checkpoint of the run holds, on global rank 0."""
    lock: RunLock | None = None
    """Of the run directory, on global rank 0: nothing is written once another run has it."""
    saved_step: int = 0
    """Newest step that is saved completely, as far as this rank has taken note of it: the same on
    every rank. 0: none."""
    failures: int = 0
    """Saves that failed since the start."""
    blocked_seconds: float = 0.0
    """That the last save held training up."""
    _running: _BackgroundSave | None = None
    _writers: list[ProcessGroup] = field(default_factory=list)

    def save(
        self,
        step: int,
        state: Mapping[str, JsonValue],
        *,
        metrics: Mapping[str, float],
        must_succeed: bool,
    ) -> None:
        """A checkpoint of `step`, complete on return, or under way in a thread.

        Args:
            state: counters, positions, schedules by name, on global rank 0.
            metrics: of the step, on global rank 0; `checkpoint.keep_best` is looked up here.
            must_succeed: wait for it and raise where it fails, whatever the settings say.

        Raises:
            CheckpointError: on every rank, when this save or the one under way failed and the run
                has to stop for it.
        """
        started = time.monotonic()
        if self.lock is not None:
            self.lock.require_held()
        self.settle(wait=True)
        background = self.settings.asynchronous
        staged = stage_save(
            self.folder,
            step,
            chunks=self.chunks,
            optimizer=self.optimizer,
            state={**self.constants, **state},
            parallel=self.parallel,
            copy=background,
            critic=self.critic,
            score=self._score(metrics),
        )
        group = self._writers_group() if background else self.parallel.control_group
        self._running = _BackgroundSave(staged, self.settings, group)
        if background:
            self._running.start()
        else:
            self._running.run()
        if must_succeed or not background:
            self.settle(wait=True, must_succeed=must_succeed)
        self.blocked_seconds = time.monotonic() - started

    def settle(self, *, wait: bool = False, must_succeed: bool = False) -> None:
        """Take note of a save that has ended, the same on every rank.

        Communicates two integers over the control group while a save is under way.

        Args:
            wait: until it has ended on every rank.

        Raises:
            CheckpointError: it failed, and checkpoint.on_failure=stop or `must_succeed`.
        """
        running = self._running
        if running is None:
            return
        if wait:
            running.join()
        flags = torch.tensor([int(running.under_way), int(bool(running.fault))])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.parallel.control_group)
        if flags[0]:
            return
        self._running = None
        if flags[1]:
            self._note_failure(running, must_succeed)
        else:
            self.saved_step = running.staged.step

    def metrics(self) -> dict[str, float]:
        """Of the saves so far, for the next record."""
        found = {}
        if self.blocked_seconds:
            found["perf/checkpoint_seconds"] = self.blocked_seconds
            self.blocked_seconds = 0.0
        if self.failures:
            found["checkpoint/failures"] = float(self.failures)
        return found

    def restore(self, checkpoint: Path) -> tuple[Restored, bool]:
        """Fill the models from a checkpoint that `find_checkpoint` has verified.

        Returns:
            What else it holds, and False where that is weights alone, a start at step 0.
        """
        continues = holds_optimizer(checkpoint)
        restored = load_checkpoint(
            checkpoint,
            chunks=self.chunks,
            optimizer=self.optimizer if continues else None,
            parallel=self.parallel,
            critic=self.critic if continues else None,
            verify=False,
        )
        self.saved_step = restored.step
        return restored, continues

    def close(self) -> None:
        """Give a save that is under way some time, after an error; then leave it.

        What it leaves the next start removes. Local; after a run that went well nothing is left.
        """
        if self._running is not None:
            self._running.join(LEAVE_SECONDS)
            if self._running.under_way:
                logger.warning("the save of step %d is given up", self._running.staged.step)
                return
        for group in self._writers:
            dist.destroy_process_group(group)
        self._writers.clear()

    def _writers_group(self) -> ProcessGroup:
        """A group of their own for the writers' threads, made at the first background save."""
        if not self._writers:
            self._writers.append(dist.new_group(backend="gloo", timeout=WRITERS_TIMEOUT))
        return self._writers[0]

    def _score(self, metrics: Mapping[str, float]) -> Score | None:
        if self.settings.keep_best is None or self.parallel.rank > 0:
            return None
        return score_of(metrics, self.settings.keep_best)

    def _note_failure(self, running: _BackgroundSave, must_succeed: bool) -> None:
        self.failures += 1
        fault = running.fault or "another rank's writer failed"
        message = (
            f"step {running.staged.step} is not saved: {fault}. Earlier checkpoints in "
            f"{self.folder} are as they were"
        )
        if must_succeed or self.settings.on_failure == "stop":
            raise CheckpointError(
                f"{message}. Make room, or repair what is named, and start the same command again"
            )
        if self.parallel.rank == 0:
            logger.error("%s; training goes on (checkpoint.on_failure=continue)", message)


class _BackgroundSave:
    """One save, run in this thread or in one of its own."""

    def __init__(self, staged: StagedSave, settings: CheckpointConfig, group: ProcessGroup) -> None:
        self.staged = staged
        self.fault = "its writer ended without a word"
        """Empty once it is complete."""
        self._settings = settings
        self._group = group
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run in a thread, which does not keep the process alive."""
        self._thread = threading.Thread(target=self.run, name="checkpoint", daemon=True)
        self._thread.start()

    def run(self) -> None:
        try:
            write_save(self.staged, self._settings, self._group)
        except CheckpointError as error:
            self.fault = str(error)
        except (RuntimeError, OSError) as error:
            logger.debug("the writer of step %d failed", self.staged.step, exc_info=True)
            self.fault = f"a rank is gone, or refuses to go on: {error}"
        else:
            self.fault = ""

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
