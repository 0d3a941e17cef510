"""Count what a process does to the files of a folder, and end or refuse it at the n-th time.

Every open for writing, write, fsync, rename, link, unlink, mkdir and rmdir below the folder is one
point; of writes, the first of a file and one for each BLOCK, since small ones stay in a buffer. A
write that is hit leaves half of its bytes.
"""

from __future__ import annotations

import builtins
import errno
import gc
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXIT_KILLED = 9
BLOCK = 16 * 1024
NAMED = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link")


class CrashPoints:
    """Points below `root`, counted from 0 while `watching`.

    Args:
        at: the point that is hit; None only counts.
        refuses: raise ENOSPC there and at every later point that needs room, instead of ending the
            process as SIGKILL would.
    """

    def __init__(self, root: Path, at: int | None, *, refuses: bool = False) -> None:
        self.root = str(root)
        self.at = at
        self.refuses = refuses
        self.count = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        named = {name: getattr(os, name) for name in NAMED}
        opened, fsync = builtins.open, os.fsync
        try:
            for name, function in named.items():
                setattr(
                    os, name, self._named(function, frees=name in ("unlink", "remove", "rmdir"))
                )
            os.fsync = self._fsync(fsync)
            builtins.open = io.open = self._open(opened)
            yield
        finally:
            for name, function in named.items():
                setattr(os, name, function)
            os.fsync = fsync
            builtins.open = io.open = opened

    def meet(self, *, frees: bool = False, last_words: Callable[[], None] | None = None) -> None:
        """One point is reached."""
        here, self.count = self.count, self.count + 1
        if self.at is None or here < self.at or (frees and self.refuses):
            return
        if self.refuses:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.root)
        if here == self.at:
            if last_words is not None:
                last_words()
            os._exit(EXIT_KILLED)

    def _is_ours(self, path: object, dir_fd: int | None = None) -> bool:
        if not isinstance(path, str | os.PathLike):
            return False
        text = os.fspath(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        return os.path.abspath(text).startswith(self.root)

    def _named(self, function: Callable[..., Any], *, frees: bool) -> Callable[..., Any]:
        def counted(path: Any, *args: Any, **options: Any) -> Any:
            if self._is_ours(path, options.get("dir_fd")):
                self.meet(frees=frees)
            return function(path, *args, **options)

        return counted

    def _fsync(self, function: Callable[[int], None]) -> Callable[[int], None]:
        def counted(descriptor: int) -> None:
            if self._is_ours(os.readlink(f"/proc/self/fd/{descriptor}")):
                self.meet()
            function(descriptor)

        return counted

    def _open(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not (self._is_ours(path) and set(mode) & set("wxa+")):
                return function(path, mode, *args, **options)
            self.meet()
            return _CountedFile(function(path, mode, *args, **options), self)

        return counted


class _CountedFile:
    """A file whose writes are points."""

    def __init__(self, file: Any, points: CrashPoints) -> None:
        self._file = file
        self._points = points
        self._to_next_point = 0

    def write(self, data: Any) -> int:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        if self._to_next_point <= 0:
            self._points.meet(last_words=half)
            self._to_next_point = BLOCK
        self._to_next_point -= len(data)
        return self._file.write(data)

    def __enter__(self) -> _CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def fork_and_run(work: Callable[[], None]) -> Callable[[], int]:
    """Run `work` in a forked process; returns a call that waits for its exit code.

    Collections there do not walk the million objects that this process has: they took most of the
    time of a short life.
    """
    gc.freeze()
    child = os.fork()
    if child:
        return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)  # nothing of the test runner ends twice
