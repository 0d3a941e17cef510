"""What `convert` and `export` decide before they start a rank."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_dapo.cli.convert import convert_main, export_config
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.load import save_resolved
from tests.unit.config.runs import DENSE, MOE, write_run

LAYOUTS = [
    ["parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.pipeline=2"],
    ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.context=2"],
    ["parallel.data=4", "parallel.nodes=2"],
    ["device=cuda", "parallel.tensor=2", "rollout.engines=2", "rollout.engine_tensor=2"],
    ["device=cuda", "parallel.tensor=2", "rollout.placement=disaggregated"],
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_a_run_of_any_layout_is_exported_by_one_rank(tmp_path: Path, layout: list[str]) -> None:
    run = load_config(write_run(tmp_path), layout)
    save_resolved(run, run.run_dir)
    assert export_config(run.run_dir, []).parallel.world_size == 1
    assert export_config(run.run_dir, ["parallel.data=2"]).parallel.world_size == 2


def test_experts_come_back_to_one_rank(tmp_path: Path) -> None:
    layout = ["parallel.data=2", "parallel.expert=2", "parallel.expert_tensor=1"]
    run = load_config(write_run(tmp_path, hf=MOE), layout)
    save_resolved(run, run.run_dir)
    assert export_config(run.run_dir, []).parallel.expert_tensor_size == 1


def test_a_layout_that_cannot_hold_the_model_is_refused(tmp_path: Path) -> None:
    run = load_config(write_run(tmp_path, hf=DENSE), [])
    save_resolved(run, run.run_dir)
    with pytest.raises(ConfigError, match=r"parallel\.tensor=3: must divide"):
        export_config(run.run_dir, ["parallel.tensor=3"])


def test_convert_never_touches_a_run_that_has_checkpoints(tmp_path: Path) -> None:
    write_run(tmp_path)
    kept = tmp_path / "run" / "checkpoints" / "step_00000005" / "manifest.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    options = argparse.Namespace(hf_folder=tmp_path / "model", out=tmp_path / "run", overrides=[])
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        convert_main(options)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]
    assert kept.read_text() == "{}"
