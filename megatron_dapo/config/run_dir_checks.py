"""Whether a run can write where it is told to; looked up before anything is built."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("checkpoints", "dumps", "logs", "rollouts")
FILES = (
    "config.resolved.yaml",
    "metrics.jsonl",
    "owner.json",
    "run.json",
    "samples.jsonl",
    "versions.json",
)


def run_dir_problems(run_dir: Path, key: str = "run_dir") -> Iterator[str]:
    """What keeps a run from writing to `run_dir`, which need not exist yet; nothing is left in it.

    Permissions say little (root, network file systems, quotas), so a file without a name is made in
    each folder that is there.

    Args:
        key: by which the user names the folder.
    """
    told = f"{key}={run_dir}"
    try:
        there = next(folder for folder in (run_dir, *run_dir.parents) if _is_there(folder))
    except OSError as error:
        yield f"{told}: cannot be looked into: {error.strerror}. Choose another {key}."
        return
    if not there.is_dir():
        yield f"{told}: {_not_a_folder(there, key)}"
        return
    if problem := _refusal(there):
        yield f"{told}: {there} cannot be written: {problem}. {_way_out(key)}"
    elif there == run_dir:
        yield from _problems_inside(run_dir, told, key)


def _is_there(path: Path) -> bool:
    """True also for a link that leads nowhere: nothing can be made in its place."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _not_a_folder(path: Path, key: str) -> str:
    kind = "a file" if path.is_file() else "no folder"
    if path.is_symlink() and not path.exists():
        kind = f"a link to {path.readlink()}, which does not exist"
    return f"{path} is {kind}; a folder is needed. Move it away, or choose another {key}."


def _refusal(folder: Path) -> str:
    """Why no file can be made in `folder`; empty where one can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _problems_inside(run_dir: Path, told: str, key: str) -> Iterator[str]:
    """Of an earlier run's folders and files, or what stands in their place."""
    for name in FOLDERS:
        path = run_dir / name
        if not _is_there(path):
            continue
        if not path.is_dir():
            yield f"{told}: {_not_a_folder(path, key)}"
        elif problem := _refusal(path):
            yield f"{told}: {path} cannot be written: {problem}. {_way_out(key)}"
    for name in FILES:
        path = run_dir / name
        if not _is_there(path):
            continue
        if not path.is_file():
            yield f"{told}: {path} is no file. Move it away, or choose another {key}."
        elif not os.access(path, os.W_OK):
            yield f"{told}: {path} cannot be written: Permission denied. {_way_out(key)}"


def _way_out(key: str) -> str:
    return f"Give yourself the right to write there, or choose another {key}."
