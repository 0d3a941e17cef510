"""Where every rank is, on disk, and the end of a run that stands still.

Each rank notes its step, phase and progress in `run_dir/logs/progress`, from a thread of its own.
The first and the last rank compare all notes. Once no rank has moved for
`parallel.stall_seconds`, all write their stacks, and the run ends with the phase and the rank that
is behind. It goes through files, since a rank that stands still may hold any connection.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dapo.config.whole_files import whole_file

logger = logging.getLogger(__name__)

PROGRESS = "progress"
STACKS = "stacks"
START = "start"
STALL_FILE = "stall.json"
LONGEST_TICK_SECONDS = 10.0
TICKS_PER_LIMIT = 10
SILENT_TICKS = 3
EXIT_STALLED = 1


@dataclass(frozen=True)
class Note:
    """One rank's place. Ranks run the same program: the smaller `marks` is behind."""

    step: int = 0
    phase: str = START
    marks: int = 0
    """Phases and updates begun so far."""
    beats: int = 0
    """Of work that only some ranks do: responses received."""
    ticks: int = 0
    """Grows while the process runs at all."""


class Watchdog:
    """Notes of this rank, and on two ranks the comparison of all.

    Build it before the ranks meet (rank 0 removes what an earlier start left), `start` it after.

    Args:
        logs: run_dir/logs, shared by all machines.
        stall_seconds: 0: only notes, no end.
    """

    def __init__(self, logs: Path, rank: int, world_size: int, stall_seconds: float) -> None:
        self._folder, self._stacks = logs / PROGRESS, logs / STACKS
        self._rank, self._world_size = rank, world_size
        self._limit = stall_seconds
        self._tick = LONGEST_TICK_SECONDS
        if stall_seconds:
            self._tick = min(LONGEST_TICK_SECONDS, stall_seconds / TICKS_PER_LIMIT)
        self._count: Callable[[], int] = int
        self._step, self._phase, self._marks, self._ticks = 0, START, 0, 0
        self._warned = False
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stacks.mkdir(exist_ok=True)
        if rank == 0:
            for left in self._folder.iterdir():
                left.unlink(missing_ok=True)

    def start(self, count: Callable[[], int] | None = None) -> None:
        """Begin to note and to compare.

        Args:
            count: progress of this rank inside a phase, read now and then from another thread.
        """
        self._count = count or self._count
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, step: int, phase: str) -> None:
        """This rank begins `phase` of `step`."""
        self._step, self._phase = step, phase
        self.mark()
        self._changed.set()

    def mark(self) -> None:
        """One more piece of work that every rank does."""
        self._marks += 1

    def close(self) -> None:
        """Stop noting; a watchdog that was not started has nothing to stop."""
        self._ended.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        compares = bool(self._limit) and self._rank in (0, self._world_size - 1)
        seen = _Seen(self._world_size)
        last = time.monotonic()
        while not self._ended.is_set():
            now = time.monotonic()
            if now - last > SILENT_TICKS * self._tick + 1.0:
                seen = _Seen(self._world_size)  # this machine slept or was suspended
            last = now
            try:
                self._write(self._note())
                if compares and now - seen.look(self._read_all(), now) > self._limit:
                    self._report(seen.behind(now, SILENT_TICKS * self._tick))
                if self._stall_file.exists():
                    self._end(json.loads(self._stall_file.read_text())["message"])
            except OSError as error:  # a full disk; it may have room again
                self._warn(error)
            self._changed.wait(self._tick)
            self._changed.clear()

    def _note(self) -> Note:
        self._ticks += 1
        return Note(self._step, self._phase, self._marks, self._count(), self._ticks)

    @property
    def _stall_file(self) -> Path:
        return self._folder / STALL_FILE

    def _file_of(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.json"

    def _write(self, note: Note) -> None:
        _replace(self._file_of(self._rank), json.dumps(asdict(note)))

    def _read_all(self) -> dict[int, Note]:
        found = {}
        for rank in range(self._world_size):
            file = self._file_of(rank)
            if file.exists():
                found[rank] = Note(**json.loads(file.read_text()))
        return found

    def _report(self, behind: tuple[int, Note, bool]) -> None:
        rank, note, silent = behind
        state = "does not answer any more" if silent else "is the one that is behind"
        message = (
            f"no trainer rank has moved for parallel.stall_seconds={self._limit:g} in phase "
            f"{note.phase} of step {note.step}: rank {rank} {state}. Stacks of the ranks are in "
            f"{self._stacks}"
        )
        if self._stall_file.exists():
            return
        try:
            _replace(self._stall_file, json.dumps({"message": message}))
        except OSError:  # the others cannot be told, but end with this one
            self._end(message)

    def _end(self, message: str) -> None:
        try:
            with (self._stacks / f"rank_{self._rank}.txt").open("w") as file:
                file.write(f"{self._phase} of step {self._step}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            logger.critical("%s; the stacks of rank %d follow", error, self._rank)
            faulthandler.dump_traceback(all_threads=True)
        logger.critical("%s", message)
        time.sleep(2 * self._tick)  # the others write theirs: the first to end ends all
        os._exit(EXIT_STALLED)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("notes of where this rank is cannot be exchanged: %s", error)


class _Seen:
    """What one comparing rank saw of all others, and when they last moved."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._notes: dict[int, Note] = {}
        self._spoke: dict[int, float] = {}
        self._moved: float | None = None

    def look(self, notes: dict[int, Note], now: float) -> float:
        """Take the newest notes; returns when any rank last moved."""
        for rank, note in notes.items():
            before = self._notes.get(rank)
            if before is None or before.ticks != note.ticks:
                self._spoke[rank] = now
            moved = before is None or (before.marks, before.beats) != (note.marks, note.beats)
            if moved or note.phase == START:  # starting up has limits of its own
                self._moved = now
        self._notes = notes
        if self._moved is None:
            self._moved = now
        return self._moved

    def behind(self, now: float, silence: float) -> tuple[int, Note, bool]:
        """The rank that holds up the others: one that fell silent, else the least advanced."""
        silent = [r for r in self._notes if now - self._spoke[r] > silence]
        rank = min(silent or self._notes, key=lambda r: (self._notes[r].marks, r))
        return rank, self._notes[rank], bool(silent)


def _replace(path: Path, text: str) -> None:
    with whole_file(path) as draft:
        draft.write_text(text)
