"""Which weights `megatron-dapo eval` serves, with which configuration, and where it writes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_dapo.checkpoint.commit import CHECKPOINTS, step_of
from megatron_dapo.checkpoint.completion import EXPORTED, HF_FOLDER
from megatron_dapo.cli.export import find_checkpoint
from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.config.model_shape import read_hf_config
from megatron_dapo.config.wrong_target import RESOLVED_FILE, instead, is_run, what_is
from megatron_dapo.observability.run_files import read_run_record

OUT_FOLDER = "eval"
"""In the run directory; for a folder of no run in the current directory."""


@dataclass(frozen=True)
class Target:
    """Weights, and how to sample from them."""

    config: RunConfig
    """As loaded; `run_dir` is where the evaluation writes, `model.path` a folder with config.json
    and tokenizer."""
    folder: Path | None
    """Hugging Face folder to serve; None: `checkpoint` is exported first."""
    checkpoint: Path | None
    step: int
    """Rollout steps that the weights were trained for; 0 where no run says."""

    @property
    def source(self) -> Path:
        """The folder or checkpoint with the weights."""
        found = self.folder or self.checkpoint
        assert found is not None, "a target has weights"
        return found


def find_target(
    path: Path, overrides: Sequence[str], *, config_file: Path | None, out: Path | None
) -> Target:
    """What `path` names: a configuration, a run or one of its checkpoints, or a model folder.

    Args:
        config_file: for a model folder: how it is sampled.
        out: where the evaluation writes; default: a folder `eval` beside the run's files.

    Raises:
        ConfigError: none of them, or its configuration is wrong.
    """
    path = path.absolute()
    if path.exists() and not path.is_dir():
        _refuse_config(config_file, path)
        config = load_config(path, overrides)
        target = Target(config, config.model.path, None, 0)
        return _writing_to(target, out or config.run_dir / OUT_FOLDER / "start")
    if (path / "config.json").is_file():
        return _model_folder(path, overrides, config_file, out)
    if not (is_run(path) or (is_run(path.parent.parent) and path.parent.name == CHECKPOINTS)):
        raise ConfigError(
            f"TARGET={path} {what_is(path)}: give a YAML file, a run directory, one of its "
            f"{CHECKPOINTS}/step_N folders, or a Hugging Face folder.{instead(path)}"
        )
    _refuse_config(config_file, path)
    run_dir, checkpoint = find_checkpoint(path, "TARGET")
    config = load_config(run_dir / RESOLVED_FILE, overrides)
    step, exported = step_of(checkpoint), run_dir / HF_FOLDER
    current = path == run_dir and _exported_step(exported) == step
    target = Target(config, exported if current else None, checkpoint, step)
    return _writing_to(target, out or run_dir / OUT_FOLDER / checkpoint.name)


def _model_folder(
    path: Path, overrides: Sequence[str], config_file: Path | None, out: Path | None
) -> Target:
    """A Hugging Face folder, with its run's configuration where it lies in a run directory."""
    run_file = path.parent / RESOLVED_FILE
    if config_file is not None:
        config, step, place = load_config(config_file, overrides), 0, Path(OUT_FOLDER, path.name)
    elif run_file.is_file():
        config, step = load_config(run_file, overrides), _exported_step(path)
        place = path.parent / OUT_FOLDER / f"{path.name}_{step:08d}"
    else:
        config, step, place = _bare_config(path, overrides), 0, Path(OUT_FOLDER, path.name)
    model = config.model.model_copy(update={"path": path})
    config = config.model_copy(update={"model": model})
    return _writing_to(Target(config, path, None, step), out or place)


def _bare_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Defaults and `overrides` alone, in the dtype that the folder names."""
    hf_config = read_hf_config(path)
    named = hf_config.get("dtype", hf_config.get("torch_dtype"))
    tree = {
        "run_dir": OUT_FOLDER,
        "model": {"path": str(path), "dtype": "float32" if named == "float32" else "bfloat16"},
        "data": {"train": "not_read.jsonl"},
    }
    with tempfile.TemporaryDirectory(prefix="megatron_dapo_") as folder:
        file = Path(folder) / "defaults.yaml"
        file.write_text(yaml.safe_dump(tree))
        return load_config(file, overrides)


def _writing_to(target: Target, out: Path) -> Target:
    config = target.config.model_copy(update={"run_dir": out.absolute()})
    return Target(config, target.folder, target.checkpoint, target.step)


def _refuse_config(config_file: Path | None, path: Path) -> None:
    if config_file is not None:
        raise ConfigError(
            f"--config={config_file}: TARGET={path} has a configuration of its own. Leave it out, "
            "or change single keys with section.key=value."
        )


def _exported_step(folder: Path) -> int:
    """Step whose weights a run has exported into `folder`; 0 where it has exported none there."""
    if folder.name != HF_FOLDER or not (folder / "config.json").is_file():
        return 0
    step = read_run_record(folder.parent).get(EXPORTED, "")
    return int(step) if re.fullmatch("[0-9]{1,12}", step) else 0
