"""Which step a keeper holds for saved: only what was written completely."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron_dapo.checkpoint import keeper as keeper_module
from megatron_dapo.checkpoint.keeper import CheckpointKeeper
from megatron_dapo.checkpoint.save import CheckpointError, StagedSave
from megatron_dapo.config.checkpoint import CheckpointConfig
from megatron_dapo.config.errors import RunFailed
from tests.unit.conftest import Alone


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Steps for which the disk is full."""
    steps: set[int] = set()

    def write(staged: StagedSave, settings: object, group: object) -> None:
        if staged.step in steps:
            raise CheckpointError("No space left on device")

    def stage(folder: Path, step: int, **parts: object) -> StagedSave:
        return StagedSave(folder, step, {}, {})

    monkeypatch.setattr(keeper_module, "stage_save", stage)
    monkeypatch.setattr(keeper_module, "write_save", write)
    return steps


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_failed_is_not_taken_for_saved(
    alone: Alone, full: set[int], tmp_path: Path, asynchronous: bool
) -> None:
    settings = CheckpointConfig(on_failure="continue", asynchronous=asynchronous)
    keeper = CheckpointKeeper(tmp_path, settings, alone, (), None)  # type: ignore[arg-type]
    full |= {2, 4}
    seen = []
    for step in range(1, 5):
        keeper.save(step, {}, metrics={}, must_succeed=False)
        keeper.settle(wait=True)
        seen.append((keeper.saved_step, keeper.failures))
    assert seen == [(1, 0), (1, 1), (3, 1), (3, 2)]
    with pytest.raises(CheckpointError, match="step 4 is not saved: No space left"):
        keeper.save(4, {}, metrics={}, must_succeed=True)
    assert keeper.saved_step == 3
    keeper.close()


def test_a_save_under_way_is_not_saved_yet(alone: Alone, full: set[int], tmp_path: Path) -> None:
    settings = CheckpointConfig(asynchronous=True)
    keeper = CheckpointKeeper(tmp_path, settings, alone, (), None)  # type: ignore[arg-type]
    keeper.save(1, {}, metrics={}, must_succeed=False)
    assert keeper.saved_step == 0
    keeper.settle(wait=True)
    assert keeper.saved_step == 1
    keeper.close()


def test_a_save_that_another_rank_left_is_told_without_a_traceback(
    alone: Alone,
    full: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def left(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(keeper_module, "write_save", left)
    keeper = CheckpointKeeper(tmp_path, CheckpointConfig(), alone, (), None)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO), pytest.raises(RunFailed, match="Connection closed by peer"):
        keeper.save(1, {}, metrics={}, must_succeed=True)
    assert caplog.text == ""
    keeper.close()
