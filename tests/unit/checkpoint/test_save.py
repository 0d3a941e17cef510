"""What a save does on one rank before it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.checkpoint import save
from megatron_dapo.checkpoint.commit import unfinished_folder


def test_the_folder_of_all_checkpoints_is_on_the_disk_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(save, "sync_directory", flushed.append)
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save._make_room(save.StagedSave(folder, step, {}, {"state/run.json": b"{}"}), 2)
        assert (unfinished_folder(folder, step) / "state").is_dir()
    assert flushed == [tmp_path]


def test_a_disk_without_room_for_all_of_it_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(OSError, match="bytes are needed and"):
        save._make_room(save.StagedSave(tmp_path, 1, {}, {}), 1 << 60)
    assert list(tmp_path.iterdir()) == []
