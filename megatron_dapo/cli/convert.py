"""`convert`: Hugging Face folder -> Megatron shards, as a run directory at step 0.

It starts the ranks of a layout (`cli/convert_rank.py`); each reads and writes only the shards that
it holds. A run with that `run_dir` starts from them. Everything is written into `.OUT.tmp`, which
is renamed at the end and removed after a failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dapo.cli.launch import launch_ranks
from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.config.layout_checks import layout_problems
from megatron_dapo.config.load import save_resolved
from megatron_dapo.config.machine_checks import weight_problems
from megatron_dapo.config.model_family import family_problems
from megatron_dapo.config.model_shape import ModelShape, read_hf_config

RANK_MODULE = "megatron_dapo.cli.convert_rank"
LOGS = "logs"


def convert_main(options: argparse.Namespace) -> int:
    """`megatron-dapo convert HF_FOLDER OUT parallel.tensor=2 ...`; returns the exit code.

    Raises:
        ConfigError: the folder cannot be read, the layout cannot hold the model, or OUT holds
            something already.
    """
    out = options.out.absolute()
    _check_free(out)
    config = _convert_config(options.hf_folder.absolute(), out, options.overrides)
    _check_shapes(config)
    _warn_of_rounding(config)
    unfinished = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        resolved = save_resolved(config, unfinished)
        command = ["-m", RANK_MODULE, "--config", str(resolved), "--out", str(unfinished)]
        code = launch_ranks(command, config.parallel.world_size, unfinished / LOGS)
        if code == 0:
            unfinished.rename(out)
            sys.stdout.write(f"{options.out}\n")
        return code
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_free(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise ConfigError(
            f"OUT={out} exists: name a folder that does not, or an empty one; nothing is "
            "overwritten"
        )


def _convert_config(source: Path, out: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of the run that starts from the shards.

    Raises:
        ConfigError: model, weights or layout cannot be used.
    """
    hf_config = read_hf_config(source)
    dtype = _stored_dtype(hf_config)
    config = RunConfig.model_validate(
        {
            "run_dir": out,
            "model": {"path": source, "dtype": dtype if dtype == "float32" else "bfloat16"},
            "data": {"train": os.devnull},  # a conversion reads no prompts
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(save_resolved(config, Path(folder)), overrides)
    problems = [
        *family_problems(hf_config),
        *layout_problems(config, ModelShape.from_hf(hf_config)),
        *weight_problems(source),
    ]
    if problems:
        raise ConfigError(problems)
    return config


def _check_shapes(config: RunConfig) -> None:
    """As the ranks will read them; for that transformers is imported.

    Raises:
        ConfigError: they cannot.
    """
    from megatron_dapo.config.pretrained import pretrained_config

    pretrained_config(config.model)


def _stored_dtype(hf_config: Mapping[str, object]) -> object:
    """What config.json says that the weights are in."""
    return hf_config.get("dtype", hf_config.get("torch_dtype"))


def _warn_of_rounding(config: RunConfig) -> None:
    """The shards of a float16 folder are no copy of it unless they are in float32."""
    stored = _stored_dtype(read_hf_config(config.model.path))
    if stored == "float16" and config.model.dtype == "bfloat16":
        sys.stderr.write(
            f"{config.model.path} is in float16, and model.dtype=bfloat16 rounds its numbers from "
            "11 bits to 8. Give model.dtype=float32 to keep them as they are\n"
        )
