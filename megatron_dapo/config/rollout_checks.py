"""Rules of sampling ahead of training and of what is kept between steps.

Each rule yields complete messages: key, value seen, what is allowed, what to do.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dapo.config.schema import RolloutConfig, RunConfig, SamplingConfig

CORRECTIONS = "tis_token, tis_sequence, icepop, sequence_mask or geometric"


def scheduling_problems(config: RunConfig) -> Iterator[str]:
    """Everything that a schedule of rollouts refuses before a run starts."""
    yield from _kept_problems(config.sampling)
    yield from _mode_problems(config)
    yield from _staleness_problems(config)
    yield from _round_problems(config)
    if config.loss.mismatch == "none" and (reason := _stale_by(config)) is not None:
        yield (
            f"loss.mismatch=none: with {reason} some responses come from older weights than those "
            "that train on them, and nothing would correct for it: old log-probs are the "
            f"trainer's at the current version. Set loss.mismatch to {CORRECTIONS}."
        )


def _kept_problems(sampling: SamplingConfig) -> Iterator[str]:
    surplus, unfinished = sampling.surplus, sampling.unfinished
    if surplus == "drop" and unfinished != "abort":
        yield (
            f"sampling.unfinished={unfinished}: sampling.surplus=drop keeps nothing for the next "
            "step, so it takes only abort. Leave it out, or set sampling.surplus=carry."
        )
    if surplus == "carry" and unfinished == "abort":
        yield (
            "sampling.unfinished=abort: with sampling.surplus=carry the groups that end soon would "
            "be kept and the long ones lost, which favours short responses. Set "
            "sampling.unfinished=finish or continue."
        )


def _mode_problems(config: RunConfig) -> Iterator[str]:
    rollout, sampling = config.rollout, config.sampling
    mode = f"rollout.mode={rollout.mode}"
    if rollout.mode == "one_step_off" and sampling.surplus != "drop":
        yield (
            f"sampling.surplus=carry: {mode} samples each step whole, from one version, and takes "
            "only drop. Leave it out, or use rollout.mode=async, which carries groups on."
        )
    if rollout.mode == "async" and sampling.surplus != "carry":
        yield (
            f"sampling.surplus=drop: {mode} samples on from step to step, so what one step does "
            "not take is the next one's; it takes only carry. Set sampling.surplus=carry and "
            "sampling.unfinished=continue (or finish: a checkpoint then waits for all responses)."
        )
    shares = rollout.placement == "colocated" and config.device != "cpu" and not rollout.endpoints
    if rollout.mode != "sync" and shares:
        yield (
            f"rollout.placement=colocated: {mode} samples while the trainer trains, and engines "
            "that share its devices sleep meanwhile. Set rollout.placement=disaggregated "
            "(device=cpu: any)."
        )


def _staleness_problems(config: RunConfig) -> Iterator[str]:
    rollout, usual = config.rollout, RolloutConfig().max_staleness
    if rollout.max_staleness == usual:
        return
    if rollout.mode == "one_step_off":
        yield (
            f"rollout.max_staleness={rollout.max_staleness}: rollout.mode=one_step_off is exactly "
            "one version behind. Leave it out, or use rollout.mode=async."
        )
    elif rollout.mode == "sync" and config.sampling.surplus == "drop":
        yield (
            f"rollout.max_staleness={rollout.max_staleness}: rollout.mode=sync with "
            "sampling.surplus=drop trains on nothing older. Leave it out, or use "
            "rollout.mode=async or sampling.surplus=carry."
        )


def _round_problems(config: RunConfig) -> Iterator[str]:
    sampling, target = config.sampling, config.rollout.prompts_per_step
    if sampling.prompts_per_round is None or sampling.when_short == "train":
        return
    most = sampling.max_rounds * sampling.prompts_per_round
    if sampling.dynamic and most < target:
        yield (
            f"sampling.prompts_per_round={sampling.prompts_per_round}: a step samples at most "
            f"sampling.max_rounds={sampling.max_rounds} times as many prompts, {most}, and never "
            f"has the groups of rollout.prompts_per_step={target}. Raise one of the two."
        )


def _stale_by(config: RunConfig) -> str | None:
    """The setting that makes trained responses older than the weights; None without one."""
    if config.rollout.mode != "sync":
        return f"rollout.mode={config.rollout.mode}"
    if config.sampling.surplus == "carry":
        return "sampling.surplus=carry"
    return None
