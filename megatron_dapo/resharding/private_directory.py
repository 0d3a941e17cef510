"""A directory that only this run's processes may enter, and that no dead run leaves behind."""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

PREFIX = "megatron_dapo_"
LOCK_FILE = "lock"
SHARED_MEMORY = Path("/dev/shm")


class PrivateDirectory:
    """Directory of mode 0700 that goes away with its owner.

    With `close`, at interpreter exit, or, after a crash, when the next one is made in the same
    parent: a lock that only a living owner holds tells them apart.
    """

    def __init__(self, parent: Path = SHARED_MEMORY) -> None:
        """Make it, after removing what dead runs left in `parent`."""
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        unlocked = self.path / f"{LOCK_FILE}.new"
        lock = unlocked.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / LOCK_FILE)  # others see it only once it is held
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Remove the directory and everything in it; may be called twice."""
        self._remove()


def _remove(directory: Path, lock: IO[str]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lock.close()


def remove_abandoned(parent: Path) -> None:
    """Delete directories whose owner died without closing them."""
    for lock_path in parent.glob(f"{PREFIX}*/{LOCK_FILE}"):
        try:
            with lock_path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.warning("removing weights that a dead run left in %s", lock_path.parent)
                shutil.rmtree(lock_path.parent)
        except (BlockingIOError, PermissionError, FileNotFoundError):
            continue  # in use, another user's, or just removed by another run
