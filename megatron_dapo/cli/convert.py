"""`convert` and `export`: Hugging Face folder -> Megatron shards -> Hugging Face folder.

Both start the ranks of a layout (`cli/convert_rank.py`), because each rank reads or sends only the
shards that it holds. What `convert` writes is a run directory at step 0: a run with that `run_dir`
starts from the shards.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.checkpoint.commit import (
    CHECKPOINTS,
    list_steps,
    newest_complete,
    require_complete,
)
from megatron_dapo.cli.launch import launch_ranks
from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.config.layout_checks import layout_problems
from megatron_dapo.config.load import RESOLVED_FILE, save_resolved
from megatron_dapo.config.machine_checks import weight_problems
from megatron_dapo.config.model_family import family_problems
from megatron_dapo.config.model_shape import ModelShape, read_hf_config

RANK_MODULE = "megatron_dapo.cli.convert_rank"
LOGS = "logs"


def convert_main(options: argparse.Namespace) -> int:
    """`megatron-dapo convert HF_FOLDER OUT parallel.tensor=2 ...`; returns the exit code.

    Raises:
        ConfigError: the folder cannot be read, the layout cannot hold the model, or OUT is a run
            that has checkpoints.
    """
    source = options.hf_folder.absolute()
    if list_steps(options.out / CHECKPOINTS):
        raise ConfigError(
            f"OUT={options.out} is a run directory with checkpoints: name a new folder, nothing is "
            "overwritten"
        )
    dtype = str(read_hf_config(source).get("dtype", "bfloat16"))
    config = RunConfig.model_validate(
        {
            "run_dir": options.out,
            "model": {"path": source, "dtype": dtype if dtype == "float32" else "bfloat16"},
            "data": {"train": os.devnull},  # a conversion reads no prompts
        }
    )
    config = load_config(save_resolved(config, config.run_dir), options.overrides)
    _check(config)
    resolved = save_resolved(config, config.run_dir)
    return _launch(["convert", "--config", str(resolved)], config, config.run_dir)


def export_main(options: argparse.Namespace) -> int:
    """`megatron-dapo export RUN_OR_CHECKPOINT OUT`; returns the exit code.

    Raises:
        ConfigError: no complete checkpoint is there, or OUT exists.
    """
    run_dir, checkpoint = find_checkpoint(options.checkpoint.absolute())
    out = options.out.absolute()
    if out.exists():
        raise ConfigError(f"OUT={out} exists: name a folder that does not, nothing is overwritten")
    config = export_config(run_dir, options.overrides)
    resolved = save_resolved(config, run_dir / "export")
    arguments = ["export", "--config", str(resolved), "--checkpoint", str(checkpoint)]
    return _launch([*arguments, "--out", str(out)], config, out)


def export_config(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run on one rank, whatever layout it was trained in; then `overrides`.

    Raises:
        ConfigError: the layout cannot hold the model.
    """
    sizes = ("tensor", "pipeline", "context", "data", "expert", "nodes")
    one_rank = [f"parallel.{key}=1" for key in sizes]
    unset = ("virtual_pipeline", "expert_tensor", "sequence_parallel")
    one_rank += [f"parallel.{key}=null" for key in unset]
    no_engines = ["rollout.engines=1", "rollout.engine_tensor=1", "rollout.placement=colocated"]
    config = load_config(run_dir / RESOLVED_FILE, [*one_rank, *no_engines, *overrides])
    _check(config)
    return config


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """Run directory and checkpoint that `path` names: a run (its newest one), or one of its steps.

    Raises:
        ConfigError: neither.
    """
    run_dir = path if (path / RESOLVED_FILE).is_file() else path.parent.parent
    if not (run_dir / RESOLVED_FILE).is_file():
        raise ConfigError(
            f"CHECKPOINT={path}: must be a run directory (with {RESOLVED_FILE}) or one of its "
            f"{CHECKPOINTS}/step_N folders"
        )
    checkpoint = newest_complete(run_dir / CHECKPOINTS) if path == run_dir else path
    if checkpoint is None:
        raise ConfigError(f"CHECKPOINT={path}: no complete checkpoint in {run_dir / CHECKPOINTS}")
    try:
        require_complete(checkpoint)
    except RuntimeError as error:
        raise ConfigError(str(error)) from error
    return run_dir, checkpoint


def _check(config: RunConfig) -> None:
    hf_config = read_hf_config(config.model.path)
    problems = [
        *family_problems(hf_config),
        *layout_problems(config, ModelShape.from_hf(hf_config)),
        *weight_problems(config.model.path),
    ]
    if problems:
        raise ConfigError(problems)


def _launch(arguments: Sequence[str], config: RunConfig, out: Path) -> int:
    """Run the ranks; name what they wrote."""
    command = ["-m", RANK_MODULE, *arguments]
    code = launch_ranks(command, config.parallel.world_size, config.run_dir / LOGS)
    if code == 0:
        sys.stdout.write(f"{out}\n")
    return code
