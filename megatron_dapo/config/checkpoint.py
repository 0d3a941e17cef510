"""Keys of section `checkpoint`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_dapo.config.section import NaturalInt, PositiveInt, Section


class CheckpointConfig(Section):
    """What is kept, and when."""

    every: NaturalInt = 5
    """Rollout steps between checkpoints. 0: only at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints kept; an old one goes only after a new one is complete."""
    keep_every: NaturalInt = 0
    """Steps that are multiples of it are kept for good, beside the newest. 0: none."""
    keep_best: str | None = Field(default=None, min_length=1)
    """Metric, such as val-core/aime/acc/mean@32, whose best checkpoint is kept too. Only a step
    that has it when it is saved is compared."""
    keep_best_is: Literal["highest", "lowest"] = "highest"
    """Which value of `keep_best` is the best."""
    asynchronous: bool = False
    """Training goes on while a thread writes a copy: each rank holds its shard of weights and
    optimizer a second time in CPU memory."""
    on_failure: Literal["stop", "continue"] = "stop"
    """A checkpoint that cannot be written (disk full): end the run, or go on until the next one is
    due. The last one of a run must succeed."""
    export_hf: bool = True
    """Write the Hugging Face folder at the end of the run."""
