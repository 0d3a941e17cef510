"""A run directory that cannot be written is known before anything is built."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path

import pytest

from megatron_dapo.cli.main import main
from megatron_dapo.config.errors import EXIT_CONFIG
from megatron_dapo.config.run_dir_checks import FILES, FOLDERS, run_dir_problems
from tests.unit.config.runs import write_run


def a_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")


def told(run_dir: Path) -> str:
    (problem,) = run_dir_problems(run_dir)
    assert problem.startswith(f"run_dir={run_dir}: "), problem
    assert "choose another run_dir." in problem.lower(), problem
    return problem


@pytest.mark.parametrize("below", ["", "run", "run/of/today"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    a_file(tmp_path / "taken")
    assert f"{tmp_path / 'taken'} is a file; a folder is needed" in told(tmp_path / "taken" / below)


@pytest.mark.parametrize("below", ["", "run"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    assert "is a link to nowhere, which does not exist" in told(tmp_path / "link" / below)


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    assert "File name too long" in told(tmp_path / ("r" * 300))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_in_place_of_a_folder_of_the_run_is_named(tmp_path: Path, name: str) -> None:
    a_file(tmp_path / "run" / name)
    assert f"{tmp_path / 'run' / name} is a file" in told(tmp_path / "run")


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_place_of_a_file_of_the_run_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    assert f"{tmp_path / 'run' / name} is no file" in told(tmp_path / "run")


@pytest.mark.parametrize("refuses", ["run", "run/checkpoints", "run/logs"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOSPC])
def test_what_the_file_system_refuses_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str, code: int
) -> None:
    """Also where permissions would allow it: a file is tried in each folder that is there."""
    for name in FOLDERS:
        (tmp_path / "run" / name).mkdir(parents=True)
    really = tempfile.TemporaryFile

    def refuse(*, dir: Path) -> object:
        if dir == tmp_path / refuses:
            raise OSError(code, os.strerror(code), str(dir))
        return really(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert f"{tmp_path / refuses} cannot be written: {os.strerror(code)}" in told(tmp_path / "run")


def test_a_file_of_an_earlier_run_that_may_not_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.jsonl"
    a_file(file)
    monkeypatch.setattr(os, "access", lambda path, mode: path != file)
    assert f"{file} cannot be written: Permission denied" in told(tmp_path)


@pytest.mark.parametrize("exists", [False, True])
def test_a_directory_that_can_be_written_is_left_as_it_was(tmp_path: Path, exists: bool) -> None:
    run_dir = tmp_path / "run"
    if exists:
        (run_dir / "logs").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert list(run_dir_problems(run_dir)) == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("flags", [[], ["--dry-run"], ["--fresh"]], ids=str)
def test_train_refuses_it_as_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    file = write_run(tmp_path)
    a_file(tmp_path / "run")
    assert main(["train", str(file), "device=cpu", *flags]) == EXIT_CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.match(r"configuration: run_dir=.*/run is a file; a folder is needed", lines[0])
