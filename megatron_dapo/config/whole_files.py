"""Files that change in one rename: a reader, and a crash, find the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft to write, which takes the place of `path` in one rename where the block ends well.

    Readers see the old file or the new one. After a failure the old one is left, and no draft.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def replace_durably(path: Path, text: str) -> None:
    """Replace a small file; also after a crash of the machine it is the old one or the new one.

    Raises:
        OSError: it cannot be written; the old one is left.
    """
    with whole_file(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
