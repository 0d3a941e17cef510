"""Crash-safe directories: a checkpoint is complete or it is not there.

A save writes into `.step_N.tmp`, then flushes every file, writes the manifest (sizes and
SHA-256), renames the directory and moves the pointer file. A directory without a manifest, or
with a file missing or of another size, is incomplete and is never resumed from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder in a run directory."""
TENSORS = "megatron"
"""Folder in a checkpoint: the distributed checkpoint of weights and optimizer."""
MANIFEST_FILE = "manifest.json"
POINTER_FILE = "latest"
"""Holds the name of the newest complete checkpoint, for people and scripts."""
_STEP = re.compile(r"step_(\d{8,})")


class FileRecord(TypedDict):
    """What the manifest says of one file."""

    bytes: int
    sha256: str


def step_folder(folder: Path, step: int) -> Path:
    """Where the committed checkpoint of `step` lies."""
    return folder / f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Step of a committed checkpoint, by its name."""
    match = _STEP.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not named like a checkpoint"
    return int(match[1])


def unfinished_folder(folder: Path, step: int) -> Path:
    """Where the save of `step` writes before it is committed."""
    return folder / f".step_{step:08d}.tmp"


def find_faults(checkpoint: Path) -> list[str]:
    """Why a checkpoint directory is incomplete, by file; empty when it is complete."""
    manifest = checkpoint / MANIFEST_FILE
    if not manifest.is_file():
        return [f"{MANIFEST_FILE} is missing"]
    faults = []
    for name, record in read_manifest(checkpoint).items():
        path = checkpoint / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != record["bytes"]:
            faults.append(f"{name} has {path.stat().st_size} bytes instead of {record['bytes']}")
    return faults


def read_manifest(checkpoint: Path) -> dict[str, FileRecord]:
    """File name -> size and SHA-256 of everything in a committed checkpoint."""
    return json.loads((checkpoint / MANIFEST_FILE).read_text())["files"]


def list_steps(folder: Path) -> list[int]:
    """Steps that have a directory here, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    matches = (_STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def newest_complete(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None; warns of each incomplete one that it passes."""
    for step in reversed(list_steps(folder)):
        checkpoint = step_folder(folder, step)
        faults = find_faults(checkpoint)
        if not faults:
            return checkpoint
        logger.warning("%s is incomplete (%s): trying an older one", checkpoint, faults[0])
    return None


def require_complete(checkpoint: Path) -> None:
    """Refuse a directory that is not a complete checkpoint.

    Raises:
        RuntimeError: names the first fault.
    """
    faults = find_faults(checkpoint)
    if faults:
        raise RuntimeError(
            f"checkpoint {checkpoint} is incomplete: {faults[0]}; resume from an older one "
            "(newest_complete finds it) or start anew"
        )


def list_files(directory: Path) -> list[str]:
    """Names of all files below `directory`, sorted, with / between folders."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.relative_to(directory).as_posix() for path in files)


def record_files(directory: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Flush files to disk and record their sizes and digests."""
    records: dict[str, FileRecord] = {}
    for name in names:
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            records[name] = FileRecord(bytes=file.tell(), sha256=digest)
    return records


def verify_files(checkpoint: Path, names: Iterable[str]) -> None:
    """Compare files with the manifest's digests.

    Raises:
        RuntimeError: a file changed after it was committed.
    """
    manifest = read_manifest(checkpoint)
    for name in names:
        with (checkpoint / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != manifest[name]["sha256"]:
            raise RuntimeError(
                f"{checkpoint / name} differs from the digest in {MANIFEST_FILE}: the file is "
                "damaged; resume from another checkpoint"
            )


def commit(folder: Path, step: int, records: Mapping[str, FileRecord]) -> Path:
    """Turn the finished `.step_N.tmp` into `step_N` and point to it.

    One process calls it, after every file is written and recorded. An earlier directory of the
    same step is replaced.
    """
    unfinished, final = unfinished_folder(folder, step), step_folder(folder, step)
    manifest = {"format": 1, "step": step, "files": dict(sorted(records.items()))}
    write_text_durably(unfinished / MANIFEST_FILE, json.dumps(manifest, indent=1))
    for directory in (*(path for path in unfinished.rglob("*") if path.is_dir()), unfinished):
        sync_directory(directory)
    if final.exists():
        remove_checkpoint(final)
    unfinished.rename(final)
    sync_directory(folder)
    write_text_durably(folder / POINTER_FILE, final.name + "\n")
    return final


def steps_to_remove(complete_steps: Sequence[int], keep: int) -> list[int]:
    """Complete steps beyond the `keep` newest."""
    return sorted(complete_steps)[:-keep]


def remove_old(folder: Path, keep: int) -> None:
    """Delete the oldest complete checkpoints; call it only after a new one is committed."""
    complete = [step for step in list_steps(folder) if not find_faults(step_folder(folder, step))]
    for step in steps_to_remove(complete, keep):
        remove_checkpoint(step_folder(folder, step))


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first: a half-deleted one is seen as incomplete."""
    (checkpoint / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def write_text_durably(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new, also after a crash."""
    unfinished = path.with_name(f".{path.name}.tmp")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
