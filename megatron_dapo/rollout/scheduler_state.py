"""What a checkpoint holds of the sampling, as JSON: groups that wait and unfinished responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import pydantic
from pydantic import BaseModel, ConfigDict, JsonValue

from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.draft import Draft
from megatron_dapo.rollout.group_state import DraftStateError, drafts_from_json, drafts_to_json
from megatron_dapo.rollout.keep_rate import KeepRate
from megatron_dapo.rollout.selection import FilterCounts
from megatron_dapo.types import Group


@dataclass(frozen=True)
class ReadyStep:
    """A step that only waits to be trained on."""

    step: int
    kept: tuple[Draft, ...]
    generated: tuple[Group, ...]
    counts: FilterCounts
    metrics: Mapping[str, float]
    """All but those that depend on the weights that will train on it."""


@dataclass(frozen=True)
class SchedulerState:
    """Between two steps."""

    rate: KeepRate
    ready: Sequence[Draft]
    """Complete and usable groups of no step yet."""
    unfinished: Sequence[Draft]
    ahead: ReadyStep | None
    """The next step, where it was sampled ahead. Its `generated` groups are not saved."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Counts(_Strict):
    generated: int
    kept: int
    all_right: int
    all_wrong: int
    ungraded: int
    surplus: int


class _Ahead(_Strict):
    step: int
    kept: list[JsonValue]
    counts: _Counts
    metrics: dict[str, float]


class _Saved(_Strict):
    format: Literal[1, 2]
    """1: token ids and log-probs in 64 bits, always; nothing else differs."""
    keep_rate: float = pydantic.Field(gt=0, le=1)
    measured_steps: int = pydantic.Field(ge=0)
    ready: list[JsonValue]
    unfinished: list[JsonValue]
    ahead: _Ahead | None


def state_to_json(state: SchedulerState) -> dict[str, JsonValue]:
    """Everything that `state_from_json` needs."""
    ahead = state.ahead
    saved = _Saved(
        format=2,
        keep_rate=state.rate.value,
        measured_steps=state.rate.steps,
        ready=drafts_to_json(state.ready),
        unfinished=drafts_to_json(state.unfinished),
        ahead=None
        if ahead is None
        else _Ahead(
            step=ahead.step,
            kept=drafts_to_json(ahead.kept),
            counts=_Counts(**asdict(ahead.counts)),
            metrics=dict(ahead.metrics),
        ),
    )
    return saved.model_dump(mode="json")


def state_from_json(state: Mapping[str, JsonValue], group_size: int) -> SchedulerState:
    """The state that was saved.

    Raises:
        DraftStateError: it is damaged, or its groups have another size than rollout.group_size.
    """
    try:
        saved = _Saved.model_validate(dict(state))
    except pydantic.ValidationError as error:
        raise DraftStateError(f"the saved state of the sampling is damaged: {error}") from error
    ready = drafts_from_json(saved.ready, group_size)
    unfinished = drafts_from_json(saved.unfinished, group_size)
    ahead = saved.ahead
    kept = () if ahead is None else tuple(drafts_from_json(ahead.kept, group_size))
    if any(draft.group is None for draft in (*ready, *kept)):
        raise DraftStateError("the saved state of the sampling has an incomplete group as complete")
    if any(draft.group is not None for draft in unfinished):
        raise DraftStateError("the saved state of the sampling has a complete group as unfinished")
    return SchedulerState(
        rate=KeepRate(saved.keep_rate, saved.measured_steps),
        ready=ready,
        unfinished=unfinished,
        ahead=None
        if ahead is None
        else ReadyStep(
            ahead.step, kept, (), FilterCounts(**ahead.counts.model_dump()), ahead.metrics
        ),
    )


def goes_on_with_unfinished(rollout: RolloutConfig, sampling: SamplingConfig) -> bool:
    """Whether responses that a step leaves unfinished go on in a later one (`Streaming`)."""
    return rollout.mode == "async" or sampling.unfinished == "continue"


def usable_state(
    state: Mapping[str, JsonValue], rollout: RolloutConfig, sampling: SamplingConfig
) -> SchedulerState:
    """The state that was saved, for a run that can go on with it.

    Raises:
        DraftStateError: it is damaged, or this run's schedule or limits cannot go on with it.
    """
    saved = state_from_json(state, rollout.group_size)
    _refuse_other_schedule(saved, rollout, sampling)
    if saved.ahead is not None:
        _refuse_other_step(saved.ahead, rollout, sampling)
    waiting = (*saved.ready, *saved.unfinished, *(saved.ahead.kept if saved.ahead else ()))
    least = max((draft.least_limit for draft in waiting), default=0)
    if least > rollout.max_response_tokens:
        raise DraftStateError(
            f"rollout.max_response_tokens={rollout.max_response_tokens}: the checkpoint holds a "
            f"response of {least} tokens, or an unfinished one that may need as many. Resume with "
            f"at least {least}, or start a new run in another run_dir"
        )
    return saved


def _refuse_other_schedule(
    saved: SchedulerState, rollout: RolloutConfig, sampling: SamplingConfig
) -> None:
    if saved.ahead is not None and rollout.mode != "one_step_off":
        raise DraftStateError(
            f"rollout.mode={rollout.mode}: step {saved.ahead.step} of the checkpoint was sampled "
            "from the weights of the step before, and only one_step_off expects that: resume with "
            "rollout.mode=one_step_off"
        )
    if saved.ready and sampling.surplus == "drop":
        raise DraftStateError(
            f"sampling.surplus=drop: the checkpoint holds {len(saved.ready)} groups of earlier "
            "weights, and drop trains on none: resume with sampling.surplus=carry"
        )
    if saved.unfinished and not goes_on_with_unfinished(rollout, sampling):
        raise DraftStateError(
            f"sampling.unfinished={sampling.unfinished}: the checkpoint holds "
            f"{len(saved.unfinished)} groups with unfinished responses, and rollout.mode="
            f"{rollout.mode} goes on with none: resume with sampling.surplus=carry and "
            "sampling.unfinished=continue"
        )


def _refuse_other_step(ahead: ReadyStep, rollout: RolloutConfig, sampling: SamplingConfig) -> None:
    """A step that was sampled ahead is trained on as it is."""
    groups, target = len(ahead.kept), rollout.prompts_per_step
    if groups == target or (groups < target and sampling.when_short == "train"):
        return
    way = "" if groups > target else "sampling.when_short=train or "
    raise DraftStateError(
        f"rollout.prompts_per_step={target}: the checkpoint holds step {ahead.step}, sampled ahead "
        f"with {groups} groups: resume with {way}rollout.prompts_per_step={groups}, or start a new "
        "run in another run_dir"
    )
