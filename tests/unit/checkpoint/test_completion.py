"""When a run counts as done, and what run.json gets back from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.checkpoint.commit import CHECKPOINTS, step_folder
from megatron_dapo.checkpoint.completion import (
    HF_FOLDER,
    is_complete,
    note_completion,
    restore_run_record,
)
from megatron_dapo.checkpoint.header import state_files
from megatron_dapo.config import ConfigError, RunConfig
from megatron_dapo.observability.run_files import read_run_record, write_run_record
from tests.unit.config.runs import make_config

STEPS = 4


def config_of(folder: Path, **sections: dict[str, object]) -> RunConfig:
    config = make_config(training={"steps": STEPS}, **sections)
    return config.model_copy(update={"run_dir": folder})


def saved(config: RunConfig, step: int) -> Path:
    return step_folder(config.run_dir / CHECKPOINTS, step)


def test_a_run_is_complete_once_its_last_step_is_saved_and_exported(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert not is_complete(config, None)
    assert not is_complete(config, saved(config, STEPS - 1))
    assert not is_complete(config, saved(config, STEPS))  # it died before its export
    note_completion(config, STEPS)
    assert not is_complete(config, saved(config, STEPS))  # the export was deleted
    (tmp_path / HF_FOLDER).mkdir()
    assert is_complete(config, saved(config, STEPS))


def test_an_export_of_an_earlier_step_does_not_complete_a_run(tmp_path: Path) -> None:
    (tmp_path / HF_FOLDER).mkdir()
    note_completion(config_of(tmp_path), STEPS - 1)
    config = config_of(tmp_path)
    assert not is_complete(config, saved(config, STEPS))
    note_completion(config_of(tmp_path, checkpoint={"export_hf": False}), STEPS)
    assert not is_complete(config, saved(config, STEPS))


def test_a_run_without_export_is_complete_with_its_last_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint={"export_hf": False})
    note_completion(config, STEPS)
    assert is_complete(config, saved(config, STEPS))


def test_a_run_that_is_to_have_fewer_steps_than_it_has_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match=r"training\.steps=4: .* already holds step 9"):
        is_complete(config, saved(config, 9))


def test_a_lost_run_record_gets_its_id_back_and_keeps_what_it_has(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step"
    (checkpoint / "state").mkdir(parents=True)
    restore_run_record(tmp_path, checkpoint)
    assert read_run_record(tmp_path) == {}
    state = {"run": {"wandb_id": "abc", "complete_step": "4"}}
    for name, content in state_files(state).items():  # type: ignore[arg-type]
        (checkpoint / name).write_bytes(content)
    restore_run_record(tmp_path, checkpoint)
    assert read_run_record(tmp_path) == {"wandb_id": "abc"}
    write_run_record(tmp_path, {"wandb_id": "new"})
    restore_run_record(tmp_path, checkpoint)
    assert read_run_record(tmp_path) == {"wandb_id": "new"}
