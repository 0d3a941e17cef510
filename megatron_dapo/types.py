"""The data contract: one frozen object for each arrow of the training step.

Text and ids live in `Prompt`, `Response` and `Group` (rank 0, before training).
Tensors live in `RolloutBatch` (the same on every rank) and `MicroBatch` (what this
rank's pipeline consumes). Everything per token is aligned at the *predicting*
position: entry t speaks of the prediction of `tokens[t + 1]`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
VersionSpans = tuple[tuple[int, int], ...]
"""(index of the first token, policy version) of each run of tokens that one version sampled."""
NO_LABEL = -100
"""Label of a position that predicts nothing: the last of a sequence, or padding."""
LEAST_SPREAD = 1e-6
"""Between the accuracies of a mixed group."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, tokenised once; the same ids go to the engine and to the trainer."""

    id: str
    """Unique in its set. Groups and metrics key on it, never on the text."""
    text: str
    """Exactly what `token_ids` decode to, template included."""
    token_ids: tuple[int, ...]
    answer: str
    """Ground truth as text; integers in normal form ("34")."""
    source: str = ""
    """Data set the row came from, for example "math_dapo"."""


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled answer: token ids exactly as the engine sampled them, stop token included."""

    prompt_id: str
    sample_index: int
    """0 .. group_size - 1 inside its group."""
    token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    """One per token of `token_ids`: the engine's log-prob under the sampling distribution."""
    finish_reason: FinishReason
    policy_version: int
    """Weights that sampled it; the oldest, where an update came in between."""
    seed: int
    text: str = ""
    """Decoded for graders and humans; never re-encoded."""
    version_spans: VersionSpans = ()
    """Which tokens came from which weights; more than one span: an update came in between."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.rollout_logprobs):
            raise RuntimeError(
                f"response {self.sample_index} of prompt {self.prompt_id}: "
                f"{len(self.token_ids)} tokens but {len(self.rollout_logprobs)} log-probs; "
                "the engine must return one log-prob for each sampled token"
            )
        if not all(map(math.isfinite, self.rollout_logprobs)):
            worst = next(x for x in self.rollout_logprobs if not math.isfinite(x))
            raise RuntimeError(
                f"response {self.sample_index} of prompt {self.prompt_id} has a log-prob of "
                f"{worst}: a sampled token has a finite one; is the engine's model broken?"
            )


@dataclass(frozen=True, slots=True)
class Reward:
    """Accuracy and shaping stay two numbers from the grader to the log (DAPO Eq. 7 and 13)."""

    accuracy: float | None
    """1.0 right, 0.0 wrong, None not graded (aborted or the grader failed). Filters read this."""
    score: float
    """Reward of the answer alone: `reward.correct` or `reward.incorrect`."""
    overlong: float = 0.0
    """Soft overlong punishment, 0 .. -penalty_factor."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of a plug-in's reward, logged as reward/<name>/mean."""
    extracted: str | None = None
    """What the grader read as the answer."""

    @property
    def shaped(self) -> float:
        """What advantages are computed from."""
        return self.score + self.overlong


@dataclass(frozen=True, slots=True)
class Group:
    """The `group_size` responses of one sampling event of a prompt, with their rewards."""

    prompt: Prompt
    responses: tuple[Response, ...]
    rewards: tuple[Reward, ...]

    def __post_init__(self) -> None:
        if len(self.responses) != len(self.rewards):
            raise RuntimeError(
                f"group of prompt {self.prompt.id}: {len(self.responses)} responses but "
                f"{len(self.rewards)} rewards; grade each response exactly once"
            )

    @property
    def mixed(self) -> bool:
        """True when the graded accuracies differ: the group carries signal (DAPO Eq. 11). What a
        plug-in computes may differ by rounding alone, which carries none."""
        graded = [reward.accuracy for reward in self.rewards if reward.accuracy is not None]
        return len(graded) > 1 and max(graded) - min(graded) > LEAST_SPREAD


@dataclass(frozen=True)
class RolloutBatch:
    """All responses of one rollout step as flat CPU tensors; identical on every rank."""

    tokens: Tensor  # [sum(prompt + response)] int64, sequences back to back
    prompt_tokens: Tensor  # [responses] int64, length of each prompt
    response_tokens: Tensor  # [responses] int64, length of each response
    rollout_logprobs: Tensor  # [sum(response_tokens)] fp32, from the engine
    rewards: Tensor  # [responses] fp32, shaped; NaN allowed where not graded
    advantages: Tensor  # [responses] fp32, relative to the group; 0 where a critic gives them
    trained: Tensor  # [responses] bool, False: overlong-filtered or not graded
    group_index: Tensor  # [responses] int64, 0 .. groups - 1
    policy_version: Tensor  # [responses] int64

    @property
    def num_responses(self) -> int:
        return self.response_tokens.numel()

    def tensors(self) -> dict[str, Tensor]:
        """Field name -> tensor, in a fixed order (used to broadcast the batch)."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True)
class MicroBatch:
    """One packed (THD) pass through the pipeline on this data-parallel rank.

    `tokens` holds whole sequences back to back; behind them padding up to the length that
    all micro-batches of the update share. Padding is its own sequence in `cu_seqlens`.
    """

    tokens: Tensor  # [tokens] int64
    labels: Tensor  # [tokens] int64, next token of the same sequence, or NO_LABEL
    position_ids: Tensor  # [tokens] int64, from 0 in each sequence
    cu_seqlens: Tensor  # [sequences + 1] int32, of the whole (not context-split) pack
    max_seqlen: int
    loss_mask: Tensor  # [tokens] bool, True where the label is a response token that trains
    sequence_index: Tensor  # [tokens] int64, 0 .. num_sequences - 1; padding points at 0, masked
    num_sequences: int  # real sequences of this pack, padding not counted
    advantages: Tensor  # [tokens] fp32
    group_index: Tensor  # [tokens] int64, group of the update's batch; padding points at 0
    rollout_logprobs: Tensor  # [tokens] fp32, 0 where there is no response token
    rows: Tensor  # [num_sequences] int64, row of each sequence in the RolloutBatch
    rewards: Tensor  # [num_sequences] fp32, shaped
    old_logprobs: Tensor | None = None  # [tokens] fp32, set by Policy.logprobs on the last stage
    reference_logprobs: Tensor | None = None  # [tokens] fp32
    values: Tensor | None = None  # [tokens] fp32, set by Critic.values on the last stage
    returns: Tensor | None = None  # [tokens] fp32, what values should be, by Critic.advantages

    @property
    def num_tokens(self) -> int:
        """Length of the pack, padding included."""
        return self.tokens.numel()

    def replace(self, **changes: object) -> MicroBatch:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
