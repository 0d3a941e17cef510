"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.checkpoint.commit import commit, list_steps, unfinished_folder
from megatron_dapo.checkpoint.header import HEADER_FILE, Header, Score
from megatron_dapo.checkpoint.retention import remove_old, score_of, steps_to_remove
from megatron_dapo.config.checkpoint import CheckpointConfig
from tests.unit.checkpoint.records import recorded

STEPS = [5, 10, 15, 20, 25, 30]
METRIC = "val-core/aime/acc/mean@32"


@pytest.mark.parametrize(
    ("settings", "scores", "kept"),
    [
        ({"keep": 2}, {}, [25, 30]),
        ({"keep": 9}, {}, STEPS),
        ({"keep": 1, "keep_every": 10}, {}, [10, 20, 30]),
        ({"keep": 1, "keep_best": METRIC}, {5: 0.1, 10: 0.4, 20: 0.3}, [10, 30]),
        ({"keep": 1, "keep_best": METRIC}, {10: 0.4, 20: 0.4}, [20, 30]),
        (
            {"keep": 1, "keep_best": METRIC, "keep_best_is": "lowest"},
            {5: 0.1, 10: 0.4},
            [5, 30],
        ),
        ({"keep": 1, "keep_best": METRIC}, {}, [30]),
    ],
)
def test_newest_every_nth_and_best_stay(
    settings: dict[str, object], scores: dict[int, float], kept: list[int]
) -> None:
    removed = steps_to_remove(STEPS, CheckpointConfig.model_validate(settings), scores)
    assert [step for step in STEPS if step not in removed] == kept


def save(folder: Path, step: int, score: Score | None) -> None:
    unfinished = unfinished_folder(folder, step)
    unfinished.mkdir(parents=True)
    (unfinished / HEADER_FILE).write_text(Header(step, {}, 1, score).text())
    commit(folder, step, recorded(unfinished))


def test_the_best_by_what_was_measured_when_it_was_saved_stays(tmp_path: Path) -> None:
    settings = CheckpointConfig(keep=1, keep_best=METRIC)
    values = {10: 0.2, 20: 0.5, 30: 0.4, 40: None}
    for step, value in values.items():
        save(tmp_path, step, None if value is None else Score(METRIC, value))
        remove_old(tmp_path, settings)
    assert list_steps(tmp_path) == [20, 40]
    remove_old(tmp_path, CheckpointConfig(keep=1, keep_best="another metric"))
    assert list_steps(tmp_path) == [40]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({}, "does not have it"),
        ({METRIC: float("nan")}, "has nan"),
        ({METRIC: float("inf")}, "inf"),
    ],
)
def test_a_step_without_a_finite_value_is_not_compared_and_says_so(
    metrics: dict[str, float], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert score_of(metrics, METRIC) is None
    assert said in caplog.text
    assert score_of({METRIC: 0.5}, METRIC) == Score(METRIC, 0.5)


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        save(tmp_path, step, None)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refused)
    remove_old(tmp_path, CheckpointConfig(keep=1))
    assert list_steps(tmp_path) == [10, 20]
    assert "an old checkpoint stays" in caplog.text


def test_an_old_checkpoint_with_a_damaged_header_does_not_fail_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = CheckpointConfig(keep=1, keep_best=METRIC)
    for step, value in {10: 0.2, 20: 0.5, 30: 0.1}.items():
        save(tmp_path, step, Score(METRIC, value))
    header = tmp_path / "step_00000010" / HEADER_FILE
    header.write_bytes(b"\x00" * header.stat().st_size)
    remove_old(tmp_path, settings)
    assert list_steps(tmp_path) == [20, 30]
    assert "has no score" in caplog.text


def test_a_folder_that_cannot_be_listed_does_not_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 10, None)

    def broken(folder: Path) -> list[int]:
        raise OSError(5, "Input/output error", str(folder))

    monkeypatch.setattr("megatron_dapo.checkpoint.retention.list_steps", broken)
    remove_old(tmp_path, CheckpointConfig(keep=1))
    assert "old checkpoints stay" in caplog.text
