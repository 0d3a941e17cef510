"""Rules between the keys of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_dapo.config.heldout import HeldoutFile, heldout_files, heldout_paths
from megatron_dapo.config.schema import RunConfig

LEAST_TEMPERATURE = 0.01
PROMPT_SUFFIXES = (".parquet", ".jsonl")


def evaluation_problems(config: RunConfig, *, in_loop: bool = True) -> Iterator[str]:
    """Held-out sets that can be read and sampled.

    Args:
        in_loop: of a run, which samples nothing with evaluation.every=0; else of `eval` alone.
    """
    yield from temperature_problems("evaluation.temperature", config.evaluation.temperature)
    own = config.evaluation.answer_style
    if own is not None and config.reward.plugin is not None:
        yield _unread_style("evaluation", own, config.reward.plugin)
    for name, chosen in config.evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        if chosen.temperature is not None:
            yield from temperature_problems(f"{key}.temperature", chosen.temperature)
        if chosen.answer_style is not None and config.reward.plugin is not None:
            yield _unread_style(key, chosen.answer_style, config.reward.plugin)
    for key, file in heldout_paths(config).items():
        yield from prompt_file_problems(key, file)
    sampled = config.evaluation.every > 0 or not in_loop
    for heldout in heldout_files(config) if sampled else ():
        if heldout.temperature == 0 and heldout.samples_per_prompt > 1:
            yield from _greedy_problem(config, heldout)


def best_problems(config: RunConfig) -> Iterator[str]:
    """A held-out metric that no step of this run will have."""
    best, sets = config.checkpoint.keep_best, config.evaluation.sets
    if best is None or not best.startswith(("val-core/", "val-aux/")):
        return
    key = f"checkpoint.keep_best={best}"
    if config.evaluation.every == 0 or not heldout_paths(config):
        yield (
            f"{key}: nothing is evaluated inside the loop, so no step has it. Set evaluation.every "
            "and data.heldout or evaluation.sets, or leave it out."
        )
    elif config.data.heldout is None and best.split("/")[1] not in sets:
        yield f"{key}: names none of evaluation.sets, {', '.join(sets)}. Name one of them."


def temperature_problems(key: str, temperature: float) -> Iterator[str]:
    """A temperature that vLLM would replace by another."""
    if 0 < temperature < LEAST_TEMPERATURE:
        yield (
            f"{key}={temperature}: vLLM samples at {LEAST_TEMPERATURE} instead of anything "
            f"between 0 and that, without a word; must be at least {LEAST_TEMPERATURE}."
        )


def prompt_file_problems(key: str, file: Path) -> Iterator[str]:
    """A prompt file whose name ends in nothing that we read."""
    if file.suffix not in PROMPT_SUFFIXES:
        yield f"{key}={file}: must be a .parquet or .jsonl file. Convert it."


def _greedy_problem(config: RunConfig, heldout: HeldoutFile) -> Iterator[str]:
    own = heldout.name is not None and config.evaluation.sets[heldout.name]
    key = f"{heldout.key}." if own and own.samples_per_prompt is not None else "evaluation."
    at = f"{heldout.key}." if own and own.temperature is not None else "evaluation."
    yield (
        f"{key}samples_per_prompt={heldout.samples_per_prompt}: at {at}temperature=0 all samples "
        f"of a prompt of {heldout.key} are equal; must be 1."
    )


def _unread_style(key: str, style: str, plugin: str) -> str:
    return (
        f"{key}.answer_style={style}: reward.plugin={plugin} grades every response and reads no "
        "style. Leave one of the two out."
    )
