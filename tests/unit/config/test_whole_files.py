"""Files that are replaced whole, and on the disk where that is promised."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dapo.checkpoint.commit import POINTER_FILE, commit, unfinished_folder
from megatron_dapo.config.load import RESOLVED_FILE, VERSIONS_FILE, save_resolved
from megatron_dapo.config.whole_files import replace_durably, whole_file
from megatron_dapo.observability.run_files import RUN_FILE, write_run_record
from tests.unit.config.runs import make_config


def test_a_file_is_replaced_whole_or_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half-way"), whole_file(path) as draft:
        draft.write_text("ne")
        raise RuntimeError("half-way")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with whole_file(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def point_to_a_step(folder: Path) -> None:
    unfinished_folder(folder, 7).mkdir()
    commit(folder, 7, {})


WRITERS: list[tuple[str, Callable[[Path], object]]] = [
    ("any", lambda folder: replace_durably(folder / "any", "text")),
    (RUN_FILE, lambda folder: write_run_record(folder, {"wandb_id": "abc"})),
    (RESOLVED_FILE, lambda folder: save_resolved(make_config(), folder)),
    (VERSIONS_FILE, lambda folder: save_resolved(make_config(), folder)),
    (POINTER_FILE, point_to_a_step),
]


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_small_files_of_a_run_are_on_the_disk_before_they_take_the_old_ones_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], object]
) -> None:
    events: list[str] = []
    flush, replace = os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        events.append("flush " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", replaced)
    write(tmp_path)
    at = events.index(f"rename to {name}")
    assert events[at - 1] == f"flush .{name}.{os.getpid()}.draft"
    assert events[at + 1] == f"flush {tmp_path.name}"


def test_a_full_disk_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    replace_durably(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_durably(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
