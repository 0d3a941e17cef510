"""How the responses of a step are drawn, and what a step brings."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.rollout.engine import GenerationRequest
from megatron_dapo.rollout.seeds import sample_seed
from megatron_dapo.rollout.selection import FilterCounts
from megatron_dapo.types import Group, Prompt


@dataclass(frozen=True)
class RolloutStep:
    """What one rollout step brings."""

    groups: tuple[Group, ...]
    """To train on, in submission order."""
    generated: tuple[Group, ...]
    """All groups that were read, the dropped ones too, in submission order. Not those that a
    checkpoint brought: carried ones, and a step that had been sampled ahead."""
    counts: FilterCounts
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How the responses of one step are drawn; the same for every prompt."""

    temperature: float
    top_p: float
    top_k: int = -1
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    step: int

    def request(self, prompt: Prompt, event: int, sample: int) -> GenerationRequest:
        return GenerationRequest(
            prompt_token_ids=prompt.token_ids,
            seed=sample_seed(self.seed, self.step, event, sample),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            request_id=f"train-{self.step}-{event}-{sample}",
        )
