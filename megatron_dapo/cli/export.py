"""`export`: checkpoint of a run -> Hugging Face folder, in this process and little memory.

No rank is started and no model is built: the weights are read parameter by parameter and written
as they come, so a model of any size and layout needs the memory of its largest tensor.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.checkpoint.commit import (
    CHECKPOINTS,
    TENSORS,
    find_faults,
    list_steps,
    newest_complete,
    read_manifest,
    require_complete,
    step_folder,
    verify_files,
)
from megatron_dapo.checkpoint.header import HEADER_FILE, read_header
from megatron_dapo.cli.signals import leaving_through_clean_up
from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.config.model_family import family_problems
from megatron_dapo.config.model_shape import read_hf_config
from megatron_dapo.config.run_dir_checks import run_dir_problems
from megatron_dapo.config.wrong_target import RESOLVED_FILE, instead, is_run, what_is
from megatron_dapo.observability.logs import quiet_logs


def export_main(options: argparse.Namespace) -> int:
    """`megatron-dapo export RUN_OR_CHECKPOINT OUT`; returns the exit code.

    Raises:
        ConfigError: no complete checkpoint is there, it is not of the model that the run names,
            or OUT exists.
    """
    quiet_logs()
    out = options.out.absolute()
    if out.exists():
        raise ConfigError(f"OUT={out} exists: name a folder that does not, nothing is overwritten")
    if problems := list(run_dir_problems(out, "OUT")):
        raise ConfigError(problems)
    run_dir, checkpoint = find_checkpoint(options.checkpoint.absolute())
    config = export_config(run_dir, options.overrides)
    try:
        with leaving_through_clean_up():
            export_checkpoint(checkpoint, config, out)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    sys.stdout.write(f"{options.out}\n")
    return 0


def export_config(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration that a run was trained with; then `overrides`, of paths for example.

    Raises:
        ConfigError: an override names a layout, or model.path holds no model of a known family.
    """
    layout = [item for item in overrides if item.startswith("parallel.")]
    if layout:
        raise ConfigError(
            f"override {layout[0]}: an export reads what any layout saved, in one process. "
            "Leave it out."
        )
    config = load_config(run_dir / RESOLVED_FILE, overrides)
    problems = list(family_problems(read_hf_config(config.model.path)))
    if problems:
        raise ConfigError(problems)
    return config


def export_checkpoint(checkpoint: Path, config: RunConfig, out: Path) -> None:
    """Write the weights of a complete checkpoint as a Hugging Face folder.

    One process calls it, without process groups. Its memory beside torch is twice the largest
    parameter, whatever the size of the model.

    Args:
        config: names the model's folder (configuration, tokenizer) and the dtype to write.

    Raises:
        ConfigError: a file of the checkpoint is damaged, reading it might run foreign code,
            another version of this package wrote it in another format, or its run removed it
            meanwhile.
        ValueError: the checkpoint is not of the model in `config.model.path`, or `out` exists.
    """
    try:
        _export(checkpoint, config, out)
    except (OSError, RuntimeError, ValueError) as error:
        if checkpoint.is_dir():
            raise
        raise ConfigError(
            f"{checkpoint} was removed while it was read, as a run that goes on removes its older "
            "checkpoints (checkpoint.keep). Take a newer step"
        ) from error


def _export(checkpoint: Path, config: RunConfig, out: Path) -> None:
    # Imported here: the other answers of this command need neither torch nor transformers.
    import torch

    from megatron_dapo.checkpoint.export import check_paths, write_hf_folder
    from megatron_dapo.checkpoint.pickled_parts import METADATA_FILE, refuse_code
    from megatron_dapo.config.pretrained import pretrained_config
    from megatron_dapo.resharding.saved_weights import saved_weights

    source = config.model.path
    check_paths(source, out)
    hf_config = pretrained_config(config.model)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]
    headers = {HEADER_FILE} & read_manifest(checkpoint).keys()
    _verify(checkpoint, [*headers, f"{TENSORS}/{METADATA_FILE}"])
    read_header(checkpoint)  # refuses another format
    refuse_code(checkpoint / TENSORS)
    stream = saved_weights(checkpoint / TENSORS, hf_config, dtype=dtype)
    _verify(checkpoint, [name for name in read_manifest(checkpoint) if name.startswith(TENSORS)])
    write_hf_folder(
        stream,
        source,
        out,
        expected=stream.tensors,
        dtype=dtype,
        tokenizer_folder=config.model.tokenizer,
    )


def _verify(checkpoint: Path, names: list[str]) -> None:
    try:
        verify_files(checkpoint, names)
    except RuntimeError as error:
        raise ConfigError(str(error)) from error


def find_checkpoint(path: Path, key: str = "CHECKPOINT") -> tuple[Path, Path]:
    """Run directory and checkpoint that `path` names: a run (its newest one), or one of its steps.

    Args:
        key: by which the user names it.

    Raises:
        ConfigError: neither; the message says which steps there are.
    """
    run_dir = path if is_run(path) else path.parent.parent
    folder = run_dir / CHECKPOINTS
    if not is_run(run_dir) or path not in (run_dir, folder / path.name):
        raise ConfigError(
            f"{key}={path} {what_is(path)}; must be a run directory (with {RESOLVED_FILE}) or "
            f"one of its {CHECKPOINTS}/step_N folders.{instead(path)}"
        )
    checkpoint = newest_complete(folder) if path == run_dir else path
    if checkpoint is None:
        raise ConfigError(
            f"{key}={path}: no complete checkpoint in {folder}; {_what_exists(folder)}"
        )
    if not checkpoint.is_dir():
        raise ConfigError(f"{key}={path} does not exist; {_what_exists(folder)}")
    if checkpoint not in [step_folder(folder, step) for step in list_steps(folder)]:
        raise ConfigError(
            f"{key}={path} is no complete checkpoint by its name; {_what_exists(folder)}"
        )
    try:
        require_complete(checkpoint)
    except RuntimeError as error:
        raise ConfigError(f"{error}; {_what_exists(folder)}") from error
    return run_dir, checkpoint


def _is_complete(checkpoint: Path) -> bool:
    try:
        return not find_faults(checkpoint)
    except ConfigError:  # of another version
        return False


def _what_exists(folder: Path) -> str:
    steps = [step for step in list_steps(folder) if _is_complete(step_folder(folder, step))]
    if not steps:
        return f"{folder} holds no complete step"
    return f"{folder} holds steps {', '.join(map(str, steps))}"
