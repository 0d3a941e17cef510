"""Files that are on the disk when we say so: counted, digested, flushed, read again."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict

READ_AGAIN_SECONDS = 2.0


class FileRecord(TypedDict):
    """What the manifest says of one file."""

    bytes: int
    sha256: str


class DurableFile:
    """A new file for writing from start to end.

    A write that fails is remembered and raised by `finish`: the writers of torch, which write
    through this object, cannot be left by an exception.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._length = 0
        self._failure: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError as failure:
            self._failure = self._failure or failure

    def write(self, data: bytes | memoryview) -> int:
        """Append; after a failure nothing is written any more."""
        length = memoryview(data).nbytes
        if self._failure is None:
            try:
                self._file.write(data)
            except OSError as failure:
                self._failure = failure
        self._digest.update(data)
        self._length += length
        return length

    def tell(self) -> int:
        """Bytes so far."""
        return self._length

    def flush(self) -> None:
        """`finish` flushes."""

    def finish(self) -> FileRecord:
        """Flush to the disk; what the file must hold from now on.

        Raises:
            OSError: of the first write that failed, or of the flush.
        """
        if self._failure is not None:
            raise self._failure
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(bytes=self._length, sha256=self._digest.hexdigest())


def write_durably(path: Path, data: bytes) -> FileRecord:
    """Write a new file and flush it."""
    with DurableFile(path) as file:
        file.write(data)
        return file.finish()


def list_files(directory: Path) -> list[str]:
    """Names of all files below `directory`, sorted, with / between folders."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.relative_to(directory).as_posix() for path in files)


def size_faults(directory: Path, records: Mapping[str, FileRecord]) -> Iterator[str]:
    """Files that are missing or of another size, one message each. Reads no content."""
    for name, record in records.items():
        path = directory / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != record["bytes"]:
            yield f"{name} has {path.stat().st_size} bytes instead of {record['bytes']}"


def content_faults(directory: Path, records: Mapping[str, FileRecord]) -> Iterator[str]:
    """Files that are not what was written, one message each. Reads all of them.

    A file that cannot be read is read once more: a stale handle of a network file system is no
    damage.
    """
    for name, record in records.items():
        try:
            digest = _digest(directory / name, tries=2)
        except OSError as error:
            yield f"{name} cannot be read: {error}"
            continue
        if digest != record["sha256"]:
            yield f"{name} differs from the digest that was taken when it was written"


def _digest(path: Path, *, tries: int) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        if tries == 1 or isinstance(error, FileNotFoundError):
            raise
    time.sleep(READ_AGAIN_SECONDS)
    return _digest(path, tries=tries - 1)
