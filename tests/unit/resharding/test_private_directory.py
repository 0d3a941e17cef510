"""What may be removed beside a new directory, and what strangers may lay there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.resharding.private_directory import (
    LOCK_FILE,
    PREFIX,
    PrivateDirectory,
    remove_abandoned,
)

CRASH = """
import os, sys
from pathlib import Path
from megatron_dapo.resharding.private_directory import PrivateDirectory
directory = PrivateDirectory(Path(sys.argv[1]))
(directory.path / "weights").write_text("1")
os._exit(9)
"""


def test_the_directory_of_a_dead_run_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], check=False)
    (dead,) = tmp_path.iterdir()
    living = PrivateDirectory(tmp_path)
    assert not dead.exists()
    remove_abandoned(tmp_path)
    assert living.path.stat().st_mode & 0o777 == 0o700
    living.close()
    living.close()
    assert not list(tmp_path.iterdir())


def test_nothing_that_a_stranger_lays_beside_it_stops_a_run_or_is_removed(tmp_path: Path) -> None:
    parent, elsewhere = tmp_path / "parent", tmp_path / "elsewhere"
    for directory in (parent, elsewhere):
        directory.mkdir()
    (elsewhere / LOCK_FILE).touch()
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    (parent / f"{PREFIX}file").touch()
    fifo, linked, folder, bare = (parent / f"{PREFIX}{n}" for n in ("a", "b", "c", "d"))
    for directory in (fifo, linked, folder, bare):
        directory.mkdir()
    os.mkfifo(fifo / LOCK_FILE)
    (linked / LOCK_FILE).symlink_to(elsewhere / LOCK_FILE)
    (folder / LOCK_FILE).mkdir()
    before = sorted(parent.iterdir())
    ours = PrivateDirectory(parent)
    assert sorted(parent.iterdir()) == sorted([*before, ours.path])
    assert (elsewhere / LOCK_FILE).exists()
    ours.close()


def test_directories_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / f"{PREFIX}theirs"
    theirs.mkdir()
    (theirs / LOCK_FILE).touch()
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    remove_abandoned(tmp_path)
    assert theirs.exists()
    monkeypatch.undo()
    remove_abandoned(tmp_path)
    assert not theirs.exists()
