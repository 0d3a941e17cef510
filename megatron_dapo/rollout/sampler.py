"""Prompts in, graded groups out: dynamic sampling over rollout engines (DAPO 3.2)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.dispatch import Dispatcher, gather_or_cancel
from megatron_dapo.rollout.engine import Engine, GenerationRequest
from megatron_dapo.rollout.rollout_metrics import rollout_metrics
from megatron_dapo.rollout.seeds import Purpose, sample_seed
from megatron_dapo.rollout.selection import (
    FilterCounts,
    NotEnoughGroups,
    next_round_prompts,
    select_groups,
)
from megatron_dapo.types import Group, Prompt, Response, Reward

logger = logging.getLogger(__name__)

Grade = Callable[[Prompt, Response], Reward]
Decode = Callable[[Sequence[int]], str]
TakePrompts = Callable[[int], list[Prompt]]


@dataclass(frozen=True)
class RolloutStep:
    """What one rollout step brings."""

    groups: tuple[Group, ...]
    """To train on, in submission order."""
    generated: tuple[Group, ...]
    """All groups, the dropped ones too, in submission order."""
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


async def collect_groups(
    engines: Sequence[Engine],
    take_prompts: TakePrompts,
    grade: Grade,
    decode: Decode,
    rollout: RolloutConfig,
    sampling: SamplingConfig,
    *,
    seed: int,
    step: int,
    policy_version: int,
    stop_token_ids: Sequence[int],
    grader_threads: int = 1,
) -> RolloutStep:
    """Groups of one step: exactly `rollout.prompts_per_step`, all of mixed accuracy.

    Rounds of prompts are sampled until enough groups are mixed; the first draws
    `sampling.prompts_per_round`, later ones what is missing divided by the share kept so far.
    Without `sampling.dynamic` one round is drawn and everything kept. Every response is graded
    once, in a thread, while others are still being sampled.

    Args:
        engines: replicas that all serve `policy_version`.
        take_prompts: the next n prompts of the data's order.
        grade: accuracy and score of one response; not called for aborted ones. From
            `grader_threads` threads at once.
        decode: token ids to the text that `grade` reads.
        seed: of the run; with `step` it fixes every sample.
        stop_token_ids: each ends a response.

    Raises:
        NotEnoughGroups: `sampling.max_rounds` were not enough, and `sampling.when_short` is stop
            (or not one group was found).
        RuntimeError: an engine serves older weights than `policy_version`.
        EngineError: an engine failed for good.
    """
    plan = SamplingPlan(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=tuple(stop_token_ids),
        group_size=rollout.group_size,
        seed=seed,
        step=step,
        policy_version=policy_version,
    )
    target = rollout.prompts_per_step
    started = time.perf_counter()
    dispatcher = Dispatcher(engines, rollout.max_concurrent_sequences)
    rounds: list[list[Group]] = []
    events = 0
    draw = (sampling.prompts_per_round if sampling.dynamic else None) or target
    with ThreadPoolExecutor(grader_threads, thread_name_prefix="grader") as pool:
        grader = _Grader(grade, decode, pool)
        while True:
            prompts = take_prompts(draw)
            if not prompts:
                raise RuntimeError(f"no prompts are left for step {step}; check data.train")
            work = [
                _sample_group(dispatcher, grader, plan, prompt, events + index)
                for index, prompt in enumerate(prompts)
            ]
            events += len(prompts)
            rounds.append(await gather_or_cancel(work))
            selection = select_groups(rounds, target, dynamic=sampling.dynamic)
            logger.debug("step %d, round %d: %s", step, len(rounds), selection.counts)
            if len(selection.kept) == target or len(rounds) == sampling.max_rounds:
                break
            draw = next_round_prompts(selection.counts, target)
    if len(selection.kept) < (target if sampling.when_short == "stop" else 1):
        raise NotEnoughGroups(target, len(rounds), selection.counts)
    generated = tuple(group for groups in rounds for group in groups)
    metrics = rollout_metrics(generated, selection)
    tokens = sum(len(response.token_ids) for g in generated for response in g.responses)
    metrics["rollout/tokens_per_second"] = tokens / (time.perf_counter() - started)
    metrics["rollout/grade_seconds"] = grader.seconds  # beside the sampling: no phase of the step
    return RolloutStep(selection.kept, generated, selection.counts, metrics)


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


class _Grader:
    """Decodes and grades in threads beside the event loop, in the order of arrival."""

    def __init__(self, grade: Grade, decode: Decode, pool: ThreadPoolExecutor) -> None:
        self.seconds = 0.0
        self._grade = grade
        self._decode = decode
        self._decoding = threading.Lock()
        self._pool = pool

    async def __call__(self, prompt: Prompt, response: Response) -> tuple[Response, Reward]:
        loop = asyncio.get_running_loop()
        response, reward, seconds = await loop.run_in_executor(
            self._pool, self._work, prompt, response
        )
        self.seconds += seconds
        return response, reward

    def _work(self, prompt: Prompt, response: Response) -> tuple[Response, Reward, float]:
        started = time.perf_counter()
        with self._decoding:  # not every tokenizer may be used from two threads
            response = dataclasses.replace(response, text=self._decode(response.token_ids))
        if response.finish_reason == "abort":
            reward = Reward(accuracy=None, score=0.0)
        else:
            reward = self._grade(prompt, response)
        return response, reward, time.perf_counter() - started


async def _sample_group(
    dispatcher: Dispatcher, grader: _Grader, plan: SamplingPlan, prompt: Prompt, event: int
) -> Group:
    async def sample(index: int) -> tuple[Response, Reward]:
        return await grader(prompt, await _sample(dispatcher, plan, prompt, event, index))

    members = await gather_or_cancel([sample(index) for index in range(plan.group_size)])
    return Group(
        prompt=prompt,
        responses=tuple(response for response, _ in members),
        rewards=tuple(reward for _, reward in members),
    )


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
