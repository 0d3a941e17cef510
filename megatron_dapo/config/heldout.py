"""Every held-out file of a run with all of its keys resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.config.evaluation import EvaluationSet
from megatron_dapo.config.schema import DataConfig, RewardConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class HeldoutFile:
    """One file of held-out prompts: how it is read, sampled and graded."""

    key: str
    """Of the configuration: data.heldout or evaluation.sets.NAME."""
    name: str | None
    """Of the set; None: each row says it (`data_source`)."""
    data: DataConfig
    """How the rows are read; `data.heldout` is the file."""
    reward: RewardConfig
    """With the answer style of this set, and without length shaping."""
    samples_per_prompt: int
    temperature: float
    top_p: float
    max_prompts: int | None


def heldout_files(config: RunConfig) -> list[HeldoutFile]:
    """`data.heldout`, where it is set, and then `evaluation.sets` in their order."""
    evaluation = config.evaluation
    chosen: list[tuple[str, str | None, EvaluationSet]] = []
    if config.data.heldout is not None:
        columns = config.data.model_dump(include={"prompt_column", "answer_column"})
        alone = EvaluationSet(path=config.data.heldout, **columns)
        chosen.append(("data.heldout", None, alone))
    chosen += [(f"evaluation.sets.{name}", name, s) for name, s in evaluation.sets.items()]
    return [_resolve(config, key, name, chosen_set) for key, name, chosen_set in chosen]


def heldout_paths(config: RunConfig) -> dict[str, Path]:
    """The files of all held-out sets by the key that names each."""
    paths = {f"evaluation.sets.{name}.path": s.path for name, s in config.evaluation.sets.items()}
    heldout = config.data.heldout
    return paths if heldout is None else {"data.heldout": heldout, **paths}


def _resolve(config: RunConfig, key: str, name: str | None, heldout: EvaluationSet) -> HeldoutFile:
    evaluation = config.evaluation
    data = {
        "heldout": heldout.path,
        "prompt_format": heldout.prompt_format or config.data.prompt_format,
        "prompt_column": heldout.prompt_column,
        "answer_column": heldout.answer_column,
        "deduplicate": True,  # copies of a problem are samples of it, and are asked for as such
    }
    style = heldout.answer_style or evaluation.answer_style or config.reward.style
    return HeldoutFile(
        key=key,
        name=name,
        data=config.data.model_copy(update=data),
        # Nobody trains on it, so no length is punished: any limit of tokens may be evaluated.
        reward=config.reward.model_copy(update={"style": style, "overlong_buffer_tokens": 0}),
        samples_per_prompt=heldout.samples_per_prompt or evaluation.samples_per_prompt,
        temperature=_either(heldout.temperature, evaluation.temperature),
        top_p=_either(heldout.top_p, evaluation.top_p),
        max_prompts=heldout.max_prompts or evaluation.max_prompts,
    )


def _either(own: float | None, default: float) -> float:
    return default if own is None else own
