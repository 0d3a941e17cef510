"""How responses are drawn; and all responses of a list of prompts, for evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.rollout.dispatch import Dispatcher, gather_or_cancel
from megatron_dapo.rollout.engine import Engine, GenerationRequest
from megatron_dapo.rollout.grading import Decode
from megatron_dapo.rollout.seeds import Purpose, sample_seed
from megatron_dapo.rollout.selection import FilterCounts
from megatron_dapo.types import Group, Prompt, Response


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
    group_size: int
    seed: int
    step: int
    policy_version: int
    """What the engines must be serving, at least."""
    purpose: Purpose = "train"

    def request(self, prompt: Prompt, event: int, sample: int) -> GenerationRequest:
        return GenerationRequest(
            prompt_token_ids=prompt.token_ids,
            seed=sample_seed(self.seed, self.step, event, sample, purpose=self.purpose),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            request_id=f"{self.purpose}-{self.step}-{event}-{sample}",
        )


async def generate_all(
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    decode: Decode,
    plan: SamplingPlan,
    *,
    max_concurrent: int,
) -> list[tuple[Response, ...]]:
    """`plan.group_size` responses of each prompt, in the order of `prompts` (evaluation).

    Raises:
        RuntimeError: an engine serves older weights than `plan.policy_version`.
        EngineError: an engine failed for good.
    """
    dispatcher = Dispatcher(engines, max_concurrent)

    async def sample(prompt: Prompt, event: int, index: int) -> Response:
        response = await _sample(dispatcher, plan, prompt, event, index)
        return dataclasses.replace(response, text=decode(response.token_ids))

    work = [
        sample(prompt, event, index)
        for event, prompt in enumerate(prompts)
        for index in range(plan.group_size)
    ]
    flat = await gather_or_cancel(work)
    size = plan.group_size
    return [tuple(flat[row * size : (row + 1) * size]) for row in range(len(prompts))]


async def _sample(
    dispatcher: Dispatcher, plan: SamplingPlan, prompt: Prompt, event: int, index: int
) -> Response:
    """One response, not decoded yet."""
    request = plan.request(prompt, event, index)
    result = await dispatcher.generate(request)
    if result.policy_version < plan.policy_version:  # newer: an update came meanwhile
        raise RuntimeError(
            f"a response of step {plan.step} came from policy version {result.policy_version}, "
            f"expected {plan.policy_version}; update the weights of every engine before sampling"
        )
    return Response(
        prompt_id=prompt.id,
        sample_index=index,
        token_ids=result.token_ids,
        rollout_logprobs=result.logprobs,
        finish_reason=result.finish_reason,
        policy_version=result.policy_version,
        seed=request.seed,
        version_spans=result.version_spans,
    )
