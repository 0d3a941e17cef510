"""What `export` decides before it reads a weight."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dapo.checkpoint import export, pickled_parts
from megatron_dapo.checkpoint.commit import (
    MANIFEST_FILE,
    commit,
    remove_checkpoint,
    unfinished_folder,
)
from megatron_dapo.checkpoint.durable_files import FileRecord
from megatron_dapo.checkpoint.header import HEADER_FILE
from megatron_dapo.cli.export import export_config, export_main, find_checkpoint
from megatron_dapo.cli.main import main
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.errors import EXIT_CONFIG
from megatron_dapo.config.load import save_resolved
from megatron_dapo.resharding import saved_weights
from tests.unit.checkpoint.records import recorded
from tests.unit.cli.exported_run import STEP, write_exported_run
from tests.unit.config.runs import write_run

LAYOUTS = [
    ["parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.pipeline=2"],
    ["parallel.data=4", "parallel.nodes=2"],
    ["device=cuda", "parallel.tensor=2", "rollout.placement=disaggregated"],
]


def write_checkpoint(run_dir: Path, step: int, *, complete: bool = True) -> Path:
    """A step of one file."""
    checkpoints = run_dir / "checkpoints"
    unfinished_folder(checkpoints, step).mkdir(parents=True)
    (unfinished_folder(checkpoints, step) / "state.json").write_text("{}")
    record = FileRecord(bytes=2 if complete else 3, sha256="0" * 64)
    return commit(checkpoints, step, {"state.json": record})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = load_config(write_run(tmp_path), [])
    save_resolved(run, run.run_dir)
    return run.run_dir


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_a_run_of_any_layout_is_exported_without_one(tmp_path: Path, layout: list[str]) -> None:
    run = load_config(write_run(tmp_path), layout)
    save_resolved(run, run.run_dir)
    assert export_config(run.run_dir, []) == run
    with pytest.raises(ConfigError, match=r"parallel\.data=2: an export reads what any layout"):
        export_config(run.run_dir, ["parallel.data=2"])


def test_the_model_folder_may_have_moved(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="does not exist"):
        export_config(run_dir, [])
    moved = export_config(run_dir, [f"model.path={tmp_path / 'moved'}"])
    assert moved.model.path == tmp_path / "moved"


def test_a_step_that_is_not_there_is_answered_with_those_that_are(run_dir: Path) -> None:
    kept = [write_checkpoint(run_dir, step) for step in (10, 20)]
    write_checkpoint(run_dir, 30, complete=False)
    missing = run_dir / "checkpoints" / "step_00000015"
    with pytest.raises(ConfigError, match=r"step_00000015 does not exist; .* holds steps 10, 20$"):
        find_checkpoint(missing)
    with pytest.raises(ConfigError, match=r"step_00000030 is incomplete.* holds steps 10, 20$"):
        find_checkpoint(run_dir / "checkpoints" / "step_00000030")
    assert find_checkpoint(run_dir) == (run_dir, kept[-1])
    assert find_checkpoint(kept[0]) == (run_dir, kept[0])


@pytest.mark.parametrize("name", ["step_00000010.corrupt", ".step_00000010.tmp", "best"])
def test_a_folder_of_another_name_is_no_checkpoint_to_use(run_dir: Path, name: str) -> None:
    kept = write_checkpoint(run_dir, 20)
    write_checkpoint(run_dir, 10).rename(kept.with_name(name))
    with pytest.raises(ConfigError, match=r"no complete checkpoint by its name; .* steps 20$"):
        find_checkpoint(kept.with_name(name))
    assert main(["eval", str(kept.with_name(name))]) == EXIT_CONFIG


def test_a_run_without_a_complete_step_says_so(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no complete checkpoint in .* holds no complete step"):
        find_checkpoint(run_dir)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a run directory \(with config\.resolved"):
        find_checkpoint(tmp_path / "nowhere")


def test_an_existing_folder_is_refused_before_the_model_is_looked_at(
    run_dir: Path, tmp_path: Path
) -> None:
    write_checkpoint(run_dir, 10)
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "out").mkdir()
    options = argparse.Namespace(checkpoint=run_dir, out=tmp_path / "out", overrides=[])
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        export_main(options)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("moment", ["refuse_code", "saved_weights", "write_hf_folder"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_named(
    tmp_path: Path,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_exported_run(tmp_path, layers=1, dtype=torch.bfloat16)
    module = {"refuse_code": pickled_parts, "saved_weights": saved_weights}.get(moment, export)
    step = getattr(module, moment)

    def removed_before(*arguments: object, **more: object) -> object:
        remove_checkpoint(tmp_path / "run" / "checkpoints" / f"step_{STEP:08d}")
        return step(*arguments, **more)

    monkeypatch.setattr(module, moment, removed_before)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == EXIT_CONFIG
    assert "was removed while it was read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_a_later_version_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_exported_run(tmp_path, layers=1, dtype=torch.bfloat16)
    checkpoints = tmp_path / "run" / "checkpoints"
    later = unfinished_folder(checkpoints, STEP + 1)
    shutil.copytree(checkpoints / f"step_{STEP:08d}", later)
    (later / MANIFEST_FILE).unlink()
    header = json.loads((later / HEADER_FILE).read_text())
    (later / HEADER_FILE).write_text(json.dumps(header | {"format": 99}))
    commit(checkpoints, STEP + 1, recorded(later))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 78
    answer = capsys.readouterr().err
    assert "made by a newer version" in answer and "checkpoint.json has format=99" in answer
    assert not (tmp_path / "out").exists()
