"""Which checkpoints stay: the newest, every n-th, and the best by a metric."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dapo.checkpoint.commit import (
    find_faults,
    list_steps,
    remove_checkpoint,
    step_folder,
)
from megatron_dapo.checkpoint.header import Score, read_header
from megatron_dapo.config import ConfigError
from megatron_dapo.config.checkpoint import CheckpointConfig

logger = logging.getLogger(__name__)


def steps_to_remove(
    complete_steps: Sequence[int], settings: CheckpointConfig, scores: Mapping[int, float]
) -> list[int]:
    """Complete steps that no rule keeps, oldest first.

    Args:
        scores: step -> value of `keep_best`, of the steps that have one.
    """
    kept = set(sorted(complete_steps)[-settings.keep :])
    if settings.keep_every:
        kept |= {step for step in complete_steps if step % settings.keep_every == 0}
    if scores:
        sign = 1 if settings.keep_best_is == "highest" else -1
        kept.add(max(scores, key=lambda step: (sign * scores[step], step)))
    return [step for step in sorted(complete_steps) if step not in kept]


def score_of(metrics: Mapping[str, float], name: str) -> Score | None:
    """What `keep_best` compares of a step: None without the metric, or where it is not finite."""
    value = metrics.get(name)
    if value is not None and math.isfinite(value):
        return Score(name, value)
    seen = "does not have it" if value is None else f"has {value}"
    logger.info("checkpoint.keep_best=%s: the step that is saved %s; not compared", name, seen)
    return None


def remove_old(folder: Path, settings: CheckpointConfig) -> None:
    """Delete what no rule keeps; call it only after a new checkpoint is committed.

    One that is incomplete neither counts nor is deleted. A failure, or one of another version's
    format, is a warning: the new checkpoint stands.
    """
    try:
        steps = [step for step in list_steps(folder) if not find_faults(step_folder(folder, step))]
        going = steps_to_remove(steps, settings, _scores(folder, steps, settings))
    except (OSError, ConfigError) as error:
        logger.warning("old checkpoints stay: %s", error)
        return
    for step in going:
        try:
            remove_checkpoint(step_folder(folder, step))
        except (OSError, shutil.Error) as error:
            logger.warning("an old checkpoint stays: %s", error)


def _scores(folder: Path, steps: Sequence[int], settings: CheckpointConfig) -> dict[int, float]:
    if settings.keep_best is None:
        return {}
    found = {step: _saved_score(step_folder(folder, step)) for step in steps}
    return {
        step: score.value
        for step, score in found.items()
        if score is not None and score.metric == settings.keep_best
    }


def _saved_score(checkpoint: Path) -> Score | None:
    """None also where the header cannot be read: only sizes are compared before."""
    try:
        return read_header(checkpoint).score
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("checkpoint.keep_best: %s has no score: %s", checkpoint, error)
        return None
