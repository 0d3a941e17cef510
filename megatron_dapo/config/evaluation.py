"""Keys of the evaluation: which held-out sets, how often, and how they are sampled."""

from __future__ import annotations

from pydantic import Field

from megatron_dapo.config.section import (
    AnswerStyle,
    LocalPath,
    NaturalInt,
    PositiveInt,
    PromptFormat,
    Section,
    Temperature,
    UserName,
)


class EvaluationSet(Section):
    """One held-out set, called by its key. What is left out is as in `evaluation`."""

    path: LocalPath
    """.parquet or .jsonl file."""
    samples_per_prompt: PositiveInt | None = None
    """Of this set."""
    temperature: Temperature | None = None
    """Of this set."""
    top_p: float | None = Field(default=None, ge=1e-6, le=1.0)
    """Of this set."""
    max_prompts: PositiveInt | None = None
    """Of this set."""
    answer_style: AnswerStyle | None = None
    """Of this set."""
    prompt_format: PromptFormat | None = None
    """Default: data.prompt_format, the one that is trained with."""
    prompt_column: str | None = None
    """Default: recognised from the file's columns; a training set's own columns say nothing."""
    answer_column: str | None = None
    """Default: recognised from the file's columns."""


class EvaluationConfig(Section):
    """Accuracy on `data.heldout` and on `sets`, inside the loop and by `megatron-dapo eval`.
    Defaults are the paper's AIME protocol."""

    every: NaturalInt = 5
    """Rollout steps between evaluations; also before the first and after the last. 0: never."""
    sets: dict[UserName, EvaluationSet] = Field(default_factory=dict)
    """Held-out sets by the name that their metrics carry: val-core/<name>/acc/mean@k."""
    samples_per_prompt: PositiveInt = 32
    """Responses of each prompt, k of avg@k, maj@k and pass@k."""
    temperature: Temperature = 1.0
    """0: greedy, one sample a prompt."""
    top_p: float = Field(default=0.7, ge=1e-6, le=1.0)
    """Share of the probability mass that is sampled from."""
    max_prompts: PositiveInt | None = None
    """Only the first ones of each set; default: all."""
    answer_style: AnswerStyle | None = None
    """Where the answer is read; default: reward.style."""
    save_samples: bool = True
    """Write every response of an evaluation to run_dir/evaluation. The numbers are always there."""
