"""A directory that only this run's processes may enter, and that no dead run leaves behind."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
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
    """Delete directories of this user whose owner died without closing them.

    Anybody may put entries of any kind into `parent`: what is not a directory of ours, or cannot
    be opened, stays.
    """
    for entry in parent.glob(f"{PREFIX}*"):
        try:
            _remove_if_abandoned(entry)
        except OSError as error:  # in use, another user's, or just removed by another run
            logger.debug("%s stays: %s", entry, error)


def _remove_if_abandoned(directory: Path) -> None:
    """Raises OSError where that cannot be told, or its lock is held."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # no link is followed, no FIFO waited for
    lock = os.open(directory / LOCK_FILE, flags)
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        logger.warning("removing weights that a dead run left in %s", directory)
        shutil.rmtree(directory)
    finally:
        os.close(lock)
