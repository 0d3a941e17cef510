"""Small file systems that only the calling process sees."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 0x4000, 1 << 18
_C = ctypes.CDLL(None, use_errno=True)


def may_mount() -> bool:
    """True where a process may have mounts of its own. Asked in a child, which it changes."""
    child = os.fork()
    if child == 0:
        try:
            _enter_namespace()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@contextmanager
def private_tmpfs(folder: Path, *, kib: int) -> Iterator[Path]:
    """A file system of `kib` at `folder`, for a process of one thread; it goes with the process."""
    folder.mkdir()
    _enter_namespace()
    _mount(b"tmpfs", folder, b"tmpfs", 0, f"size={kib}k".encode())
    yield folder


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The file system mounted at `folder` refuses writes for a while."""
    _mount(b"tmpfs", folder, b"tmpfs", MS_REMOUNT | MS_RDONLY, None)
    yield
    _mount(b"tmpfs", folder, b"tmpfs", MS_REMOUNT, None)


def _enter_namespace() -> None:
    flags = CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
    if _C.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    _mount(b"none", Path("/"), None, MS_REC | MS_PRIVATE, None)


def _mount(
    source: bytes, target: Path, kind: bytes | None, flags: int, options: bytes | None
) -> None:
    if _C.mount(source, str(target).encode(), kind, flags, options) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount: {os.strerror(number)}", str(target))
