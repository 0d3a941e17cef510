"""`train --fresh` starts a new run and never goes on in an old one by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.cli import launch
from megatron_dapo.cli.main import main
from megatron_dapo.config.errors import EXIT_CONFIG
from tests.unit.config.runs import write_run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Run directories of the runs that would start."""
    runs: list[Path] = []

    def start(config: object) -> int:
        runs.append(config.run_dir)  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(launch, "launch_training", start)
    return runs


def test_a_run_directory_that_holds_anything_is_refused(
    tmp_path: Path, started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert main(["train", str(file), "--fresh"]) == EXIT_CONFIG
    message = capsys.readouterr().err
    assert "run_dir=" in message and "(it holds checkpoints)" in message
    assert started == []


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_or_missing_one_is_taken(
    tmp_path: Path, started: list[Path], exists: bool
) -> None:
    file = write_run(tmp_path)
    if exists:
        (tmp_path / "run").mkdir()
    assert main(["train", str(file), "--fresh"]) == 0
    assert started == [tmp_path / "run"]


def test_without_it_a_run_goes_on(tmp_path: Path, started: list[Path]) -> None:
    file = write_run(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert main(["train", str(file)]) == 0
    assert started == [tmp_path / "run"]
