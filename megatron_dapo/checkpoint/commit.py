"""Crash-safe directories: a checkpoint is complete or it is not there.

    .step_N.tmp      being written; the manifest comes last
    step_N           complete: renamed once everything is flushed
    .step_N.old      made way for a new save of the same step, which follows at once
    .step_N.removed  being deleted
    step_N.corrupt   found damaged and set aside; nothing reads or deletes it

Whatever a dead process left with a dot in front, the next start finishes or removes.
A manifest names every file with its size and SHA-256, and protects itself by its own. So a manifest
of a later version of this package is told from a damaged one: it is refused, and stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from megatron_dapo.checkpoint.durable_files import (
    FileRecord,
    content_faults,
    size_faults,
    write_durably,
)
from megatron_dapo.config import ConfigError
from megatron_dapo.config.whole_files import replace_durably, sync_directory

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder in a run directory."""
TENSORS = "megatron"
"""Folder in a checkpoint: the distributed checkpoint of weights and optimizer."""
MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1
"""Rises when a manifest changes its meaning. In every format `sha256` is that of the JSON text of
all other keys."""
POINTER_FILE = "latest"
"""Holds the name of the newest complete checkpoint, for people and scripts; nothing of ours reads
it."""
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.(?:step_(\d{8,})\.(tmp|old|removed)|latest\.(?:tmp|\d+\.draft))")
_CORRUPT = re.compile(r"step_\d{8,}\.corrupt(?:\.\d+)?")


class ManifestError(ValueError):
    """A manifest is missing or damaged."""


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


def _aside(folder: Path, step: int, ending: str) -> Path:
    return folder / f".step_{step:08d}.{ending}"


def list_steps(folder: Path) -> list[int]:
    """Steps that have a directory here, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    matches = (_STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def list_corrupt(folder: Path) -> list[Path]:
    """Checkpoints that were set aside."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _CORRUPT.fullmatch(path.name))


def read_manifest(checkpoint: Path) -> dict[str, FileRecord]:
    """File name -> size and SHA-256 of everything in a committed checkpoint.

    Raises:
        ManifestError: it is missing, not as it was written, or of another step than its folder.
        ConfigError: another version of this package wrote it in another format.
    """
    path = checkpoint / MANIFEST_FILE
    files: dict[str, FileRecord] = {}
    try:
        text = path.read_text()
        document = json.loads(text)
        ours = document["format"] == MANIFEST_FORMAT
        unchanged = _own_digest(document) == document["sha256"]
        if ours:
            files, step = document["files"], document["step"]
            unchanged = text == _manifest_text(step, files)
    except FileNotFoundError as error:
        raise ManifestError(f"{MANIFEST_FILE} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{MANIFEST_FILE} cannot be read: {error}") from error
    if not unchanged:
        raise ManifestError(f"{MANIFEST_FILE} differs from its own digest")
    if not ours:
        raise other_format(checkpoint, MANIFEST_FILE, document["format"], MANIFEST_FORMAT)
    named = _STEP.fullmatch(checkpoint.name)
    if named and int(named[1]) != step:
        raise ManifestError(f"it is the checkpoint of step {step} under another name")
    return files


def other_format(checkpoint: Path, file: str, found: object, known: int) -> ConfigError:
    """The refusal of a checkpoint that is sound, and of a format that this version does not read.

    Args:
        file: of the checkpoint, whose format it is.
    """
    version = "another"
    if isinstance(found, int):
        version = "a newer" if found > known else "an older"
    return ConfigError(
        f"checkpoint {checkpoint} was made by {version} version of megatron_dapo: its {file} has "
        f"format={found}, this version reads format {known}. Nothing of it was changed. Go on with "
        "the version that wrote it, or start anew from its weights: export them there, and name "
        "the folder as model.path of a new run_dir"
    )


def find_faults(checkpoint: Path) -> list[str]:
    """Why a checkpoint is incomplete, by names and sizes; empty when it is complete.

    Raises:
        ConfigError: another version of this package wrote it in another format.
    """
    try:
        records = read_manifest(checkpoint)
    except ManifestError as error:
        return [str(error)]
    return list(size_faults(checkpoint, records))


def find_damage(checkpoint: Path) -> list[str]:
    """As `find_faults`, and by the content of every file, in this process alone."""
    return find_faults(checkpoint) or list(content_faults(checkpoint, read_manifest(checkpoint)))


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
            f"checkpoint {checkpoint} is incomplete: {faults[0]}; take another step, or start anew"
        )


def verify_files(checkpoint: Path, names: list[str]) -> None:
    """Compare files with the manifest's digests.

    Raises:
        RuntimeError: a file changed after it was committed.
    """
    records = read_manifest(checkpoint)
    for fault in content_faults(checkpoint, {name: records[name] for name in names}):
        raise RuntimeError(f"{checkpoint} is damaged: {fault}; take another step")


def commit(folder: Path, step: int, records: Mapping[str, FileRecord]) -> Path:
    """Turn the finished `.step_N.tmp` into `step_N` and point to it.

    One process calls it, after every file is written, flushed and recorded. A checkpoint of the
    same step goes only once the new one stands in its place.
    """
    unfinished, final = unfinished_folder(folder, step), step_folder(folder, step)
    write_durably(unfinished / MANIFEST_FILE, _manifest_text(step, records).encode())
    for directory in (*(path for path in unfinished.rglob("*") if path.is_dir()), unfinished):
        sync_directory(directory)
    _put_in_place(folder, step)
    try:
        replace_durably(folder / POINTER_FILE, final.name + "\n")
    except OSError as error:
        logger.warning("%s is complete, %s does not name it: %s", final, POINTER_FILE, error)
    return final


def _put_in_place(folder: Path, step: int) -> None:
    final, replaced = step_folder(folder, step), _aside(folder, step, "old")
    if final.exists():
        final.rename(replaced)
    try:
        unfinished_folder(folder, step).rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    sync_directory(folder)
    if replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)


def _manifest_text(step: int, records: Mapping[str, FileRecord]) -> str:
    document: dict[str, object] = {
        "format": MANIFEST_FORMAT,
        "step": step,
        "files": dict(sorted(records.items())),
    }
    document["sha256"] = _own_digest(document)
    return json.dumps(document, indent=1)


def _own_digest(document: Mapping[str, object]) -> str:
    """Of a manifest without that key."""
    others = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(others).encode()).hexdigest()


def clear_leftovers(folder: Path) -> None:
    """Finish or remove what a dead process left. Only who owns the run directory may call it.

    A save that died between its manifest and its rename is complete, and is kept where no
    checkpoint of its step stands.
    """
    if not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())
    found = [match for match in map(_LEFTOVER.fullmatch, names) if match]
    for match in sorted(found, key=lambda match: match[2] != "tmp"):
        path = folder / match[0]
        if match[2] is None:
            path.unlink()
            continue
        final = step_folder(folder, int(match[1]))
        if match[2] != "removed" and not final.exists() and not find_damage(path):
            logger.warning("%s is complete: it becomes %s", path, final.name)
            path.rename(final)
            sync_directory(folder)
        else:
            logger.warning("%s is left of a process that died: removed", path)
            _delete(path)


def set_aside(checkpoint: Path, fault: str) -> Path:
    """Rename a damaged checkpoint, for people to look at; nothing resumes from it any more."""
    aside = checkpoint.with_name(f"{checkpoint.name}.corrupt")
    count = 1
    while aside.exists():
        count += 1
        aside = checkpoint.with_name(f"{checkpoint.name}.corrupt.{count}")
    checkpoint.rename(aside)
    sync_directory(checkpoint.parent)
    logger.error("%s is damaged (%s): kept as %s", checkpoint, fault, aside.name)
    return aside


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint, out of sight first: a half-deleted one is never seen as a step."""
    going = _aside(checkpoint.parent, step_of(checkpoint), "removed")
    checkpoint.rename(going)
    try:
        sync_directory(checkpoint.parent)
    finally:
        _delete(going)


def _delete(path: Path) -> None:
    """A directory with all that is in it; a link without what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
