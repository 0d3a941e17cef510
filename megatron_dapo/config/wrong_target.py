"""What a path is that a command was given by mistake, and the path that was meant.

Only names of files are looked at, so that every room may ask.
"""

from __future__ import annotations

from pathlib import Path

RESOLVED_FILE = "config.resolved.yaml"
"""In a run directory: every key with its value."""
YAML_NAMES = (".yaml", ".yml", "")
"""Suffixes of configuration files; without one: a pipe of a shell."""


def what_is(path: Path) -> str:
    """A clause that follows on `KEY=path`."""
    try:
        if path.is_symlink() and not path.exists():
            return f"is a link to {path.readlink()}, which does not exist"
        if not path.exists():
            return "does not exist"
        if not path.is_dir():
            return "is a file"
        if is_run(path):
            return "is a run directory"
        return _what_folder(path)
    except OSError as error:
        return f"cannot be looked into ({error.strerror})"


def is_run(path: Path) -> bool:
    """A directory that a run writes to: its dumps and evaluations hold a configuration, too."""
    return (path / RESOLVED_FILE).is_file() and not (_is_dump(path) or _is_evaluation(path))


def run_of(path: Path) -> Path | None:
    """The run directory that `path` lies in, or is; None outside of any."""
    path = path.absolute()
    try:
        return next((folder for folder in (path, *path.parents) if is_run(folder)), None)
    except OSError:
        return None


def instead(path: Path, inside: str = "") -> str:
    """A sentence that names the run of `path` (with `inside` of it); empty outside of any."""
    run = run_of(path)
    if run is None:
        return ""
    return f" It belongs to a run: give {run / inside}" if run != path.absolute() or inside else ""


def _what_folder(path: Path) -> str:
    if (path / "manifest.json").is_file():
        return "is one checkpoint of a run"
    if _is_dump(path):
        return "is the dump of one update"
    if _is_evaluation(path):
        return "is the result of an evaluation"
    if (path / "config.json").is_file():
        return "is a Hugging Face folder"
    if any(path.glob("step_*/manifest.json")):
        return "is the folder of a run's checkpoints"
    return "is a folder of something else" if any(path.iterdir()) else "is an empty folder"


def _is_dump(path: Path) -> bool:
    return (path / "rank_0.pt").is_file()


def _is_evaluation(path: Path) -> bool:
    return (path / RESOLVED_FILE).is_file() and (path / "report.json").is_file()
