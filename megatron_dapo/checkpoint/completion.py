"""When a run is over: written down by global rank 0, which also reads it."""

from __future__ import annotations

from pathlib import Path

from megatron_dapo.checkpoint.commit import step_of
from megatron_dapo.checkpoint.header import read_state
from megatron_dapo.config import ConfigError, RunConfig
from megatron_dapo.observability.run_files import read_run_record, write_run_record

HF_FOLDER = "hf"
"""In a run directory: what the end of a run exports."""
RUN = "run"
"""State of a checkpoint: what run.json knew."""
COMPLETE, EXPORTED = "complete_step", "exported_step"
"""In run.json."""


def note_completion(config: RunConfig, step: int) -> None:
    """The run ended with `step` saved, and exported where that is asked for."""
    record = {**read_run_record(config.run_dir), COMPLETE: str(step)}
    if config.checkpoint.export_hf:
        record[EXPORTED] = str(step)
    write_run_record(config.run_dir, record)


def restore_run_record(run_dir: Path, checkpoint: Path) -> None:
    """Give run.json back what it has lost, such as the W&B id that the run goes on under."""
    saved = read_state(checkpoint, RUN)
    record = read_run_record(run_dir)
    if isinstance(saved, dict):
        known = {key: str(value) for key, value in saved.items() if key not in (COMPLETE, EXPORTED)}
        if known.keys() - record.keys():
            write_run_record(run_dir, known | record)


def is_complete(config: RunConfig, checkpoint: Path | None) -> bool:
    """True when `training.steps` are saved in `checkpoint`, and exported where that is asked for.

    Raises:
        ConfigError: more steps are saved than the run is to have.
    """
    if checkpoint is None or step_of(checkpoint) < config.training.steps:
        return False
    steps, saved = config.training.steps, step_of(checkpoint)
    if saved > steps:
        raise ConfigError(
            f"training.steps={steps}: {config.run_dir} already holds step {saved}. Ask for more "
            f"steps than {saved} to go on, or name another run_dir"
        )
    record = read_run_record(config.run_dir)
    exported = record.get(EXPORTED) == str(steps) and (config.run_dir / HF_FOLDER).is_dir()
    return record.get(COMPLETE) == str(steps) and (exported or not config.checkpoint.export_hf)
