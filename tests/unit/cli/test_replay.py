"""`megatron-dapo replay`: which ranks it starts, and what is no dump."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.cli import replay
from megatron_dapo.cli.main import main
from megatron_dapo.config.load import save_resolved
from tests.unit.config.runs import make_config


def test_a_folder_that_is_no_dump_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path)]) == 78
    assert "RUN_DIR/dumps/step_N" in capsys.readouterr().err


def test_as_many_ranks_are_started_as_wrote_the_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_resolved(make_config(parallel={"tensor": 2, "data": 2}), tmp_path)
    for rank in range(4):
        (tmp_path / f"rank_{rank}.pt").touch()
    started = []

    def launch(command: list[str], world_size: int, logs: Path) -> int:
        started.append((command, world_size, logs))
        return 1

    monkeypatch.setattr(replay, "launch_ranks", launch)
    assert main(["replay", str(tmp_path)]) == 1
    command = ["-m", "megatron_dapo.replay", str(tmp_path)]
    assert started == [(command, 4, tmp_path / "logs")]


def test_a_run_directory_and_half_a_dump_are_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "launch_ranks", lambda *_: pytest.fail("ranks were started"))
    save_resolved(make_config(parallel={"tensor": 2}), tmp_path)
    (tmp_path / "rank_0.pt").touch()
    assert main(["replay", str(tmp_path)]) == 78
    assert "1 of 2 ranks are missing, first rank_1.pt." in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()
