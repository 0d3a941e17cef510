"""A whole run on simulated engines: collect, train, update weights, again; and its account."""

from __future__ import annotations

import asyncio
import math
import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

from benchmarks.simulated_engines import (
    BLOCK,
    NORMAL,
    LengthLaw,
    SimulatedEngine,
    SpeedLaw,
    grade,
    mixed_share,
    simulated_prompts,
)
from megatron_dapo.rollout.dispatch import Dispatcher, gather_or_cancel
from megatron_dapo.rollout.engine import Generate, GenerationRequest, GenerationResult
from megatron_dapo.rollout.seeds import sample_seed
from megatron_dapo.types import Group, Prompt, Response

TakePrompts = Callable[[int], list[Prompt]]


@dataclass(frozen=True)
class Failure:
    """What happens to one engine, and when."""

    at_seconds: float
    engine: int
    kind: Literal["death", "hang", "slow"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Sizes and speeds. Trainer and engines have devices of their own in every mode."""

    engines: int = 64
    slots: int = 64
    prompts_per_step: int = 512
    group_size: int = 16
    keep_rate: float = 0.5
    max_response_tokens: int = 20480
    train_seconds_per_token: float = 1e-5
    """Of the whole trainer, old log-probs included."""
    update_seconds: float = 10.0
    steps: int = 14
    warm_up_steps: int = 4
    """First steps, that the account of time leaves out: pipelines fill, keep rates are learnt."""
    last_steps: int = 4
    """That it leaves out, too: what waits is used up, and nothing is sampled ahead any more."""
    seed: int = 0
    speed: SpeedLaw = field(default_factory=SpeedLaw)
    lengths: LengthLaw = field(default_factory=LengthLaw)
    failures: tuple[Failure, ...] = ()
    noticed_after_seconds: float = 60.0
    """A hung engine is taken for dead after so long without a heartbeat."""

    @property
    def max_blocks(self) -> int:
        return self.max_response_tokens // BLOCK

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        """As many as all steps need without any waste."""
        number = round(self.steps * self.prompts_per_step / self.keep_rate)
        return simulated_prompts(number, self.keep_rate, self.group_size, self.lengths, self.seed)

    @cached_property
    def expected(self) -> Expected:
        """What sampling each prompt equally often, and training on all mixed groups, would give."""
        mixed = [mixed_share(prompt, self.group_size) for prompt in self.prompts]
        tokens = [self._mean_tokens(prompt.token_ids[1]) for prompt in self.prompts]
        trained = math.fsum(map(operator.mul, mixed, tokens))
        return Expected(
            keep_rate=math.fsum(mixed) / len(mixed),
            trained_tokens=trained / math.fsum(mixed),
        )

    def _mean_tokens(self, per_mille: int) -> float:
        """E[min(X, limit)] of a lognormal X."""
        sigma = self.lengths.within_group
        mu = math.log(self.lengths.median_tokens * per_mille / 1000)
        at = (math.log(self.max_response_tokens) - mu) / sigma
        below = math.exp(mu + sigma**2 / 2) * NORMAL.cdf(at - sigma)
        return below + self.max_response_tokens * (1 - NORMAL.cdf(at))


@dataclass(frozen=True)
class Expected:
    """Of a rule without waste and without preferences."""

    keep_rate: float
    trained_tokens: float
    """Mean length of a trained response."""


class SimulatedFleet:
    """The engines of a scenario behind the product's dispatcher. Make it inside the loop."""

    def __init__(self, scenario: Scenario, *, keep_in_flight: bool) -> None:
        self.engines = [
            SimulatedEngine(
                number,
                scenario.slots,
                speed=scenario.speed,
                lengths=scenario.lengths,
                keep_in_flight=keep_in_flight,
            )
            for number in range(scenario.engines)
        ]
        self._scenario = scenario
        self._dead = 0
        self._dispatcher = Dispatcher(self.engines, scenario.slots)
        self._failing = [asyncio.ensure_future(self._fail(one)) for one in scenario.failures]

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await self._dispatcher.generate(request)

    async def update(self, version: int) -> None:
        """New weights on every engine, at the same time."""
        seconds = self._scenario.update_seconds
        await asyncio.gather(*(engine.update(version, seconds) for engine in self.engines))

    async def interrupt(self) -> None:
        """What runs ends, with the tokens that it has."""
        await asyncio.gather(*(engine.interrupt() for engine in self.engines))

    def capacity(self) -> int:
        """Sequences that live engines decode at once."""
        return self._scenario.slots * (len(self.engines) - self._dead)

    def decoded_tokens(self) -> float:
        """Sampled so far, by the engines' own account."""
        for engine in self.engines:
            engine.count_up_to_now()
        return BLOCK * math.fsum(engine.decoded_blocks for engine in self.engines)

    def slot_seconds(self) -> float:
        """Time that slots were in use."""
        return math.fsum(engine.slot_seconds for engine in self.engines)

    async def close(self) -> None:
        for task in self._failing:
            task.cancel()
        await asyncio.gather(*self._failing, return_exceptions=True)

    async def _fail(self, failure: Failure) -> None:
        await asyncio.sleep(failure.at_seconds)
        engine = self.engines[failure.engine]
        if failure.kind == "slow":
            engine.slow_down(4.0)
            return
        if failure.kind == "hang":
            await engine.hang(self._scenario.noticed_after_seconds)
        else:
            engine.die()
        self._dead += 1


@dataclass(frozen=True)
class Brought:
    """What a step was filled with."""

    groups: Sequence[Group]
    """To train on."""
    generated: Sequence[Group]
    """Complete groups that were looked at for it, and for no step before it."""


@dataclass(frozen=True)
class StepRecord:
    """One step of a simulated run, from its first wait to the end of its weight update."""

    seconds: float
    train_seconds: float
    trained_tokens: int
    read_tokens: int
    """Of all complete groups that were looked at, and `mixed_tokens` of those worth training on."""
    mixed_tokens: int
    decoded_tokens: float
    slot_seconds: float
    lengths: tuple[int, ...]
    """Tokens of every trained response."""
    staleness: tuple[int, ...]
    """Of every trained response: trained version less that of its oldest token."""
    groups: tuple[Group, ...]


class Sampler(Protocol):
    """Who brings the groups of a step."""

    async def collect(self, step: int, policy_version: int) -> Brought: ...


async def train(
    sampler: Sampler,
    fleet: SimulatedFleet,
    scenario: Scenario,
    before_update: Callable[[], Awaitable[None]] | None = None,
) -> list[StepRecord]:
    """`scenario.steps` steps of a trainer that sleeps instead of training."""
    loop = asyncio.get_running_loop()
    records = []
    for step in range(1, scenario.steps + 1):
        started, version = loop.time(), step - 1
        decoded, slots = fleet.decoded_tokens(), fleet.slot_seconds()
        brought = await sampler.collect(step, version)
        groups = tuple(brought.groups)
        responses = [response for group in groups for response in group.responses]
        lengths = tuple(BLOCK * len(response.token_ids) for response in responses)
        train_seconds = sum(lengths) * scenario.train_seconds_per_token
        await asyncio.sleep(train_seconds)
        if before_update is not None:
            await before_update()
        await fleet.update(version + 1)
        records.append(
            StepRecord(
                seconds=loop.time() - started,
                train_seconds=train_seconds,
                trained_tokens=sum(lengths),
                read_tokens=tokens_of(brought.generated),
                mixed_tokens=tokens_of(group for group in brought.generated if group.mixed),
                decoded_tokens=fleet.decoded_tokens() - decoded,
                slot_seconds=fleet.slot_seconds() - slots,
                lengths=lengths,
                staleness=tuple(version - response.policy_version for response in responses),
                groups=groups,
            )
        )
    return records


def tokens_of(groups: Iterable[Group]) -> int:
    """Of all responses."""
    return BLOCK * sum(len(response.token_ids) for group in groups for response in group.responses)


@dataclass(frozen=True)
class Account:
    """What a mode costs and brings.

    Tokens are those of the whole run: what its first step overdraws counts, and what its last one
    leaves behind. Times and ages are those of the steps between `Scenario.warm_up_steps` and
    `last_steps`.
    """

    generated_per_trained: float
    """Tokens that engines sampled for each token that was trained on."""
    wasted_share: float
    """Of the sampled tokens: neither trained on, nor of groups without signal that had to be
    looked at to find as many. At the keep rate, in tokens, that this very run has met."""
    step_seconds: float
    engines_idle: float
    """Share of slot time without a sequence that is being sampled."""
    trainer_idle: float
    length_ratio: float
    """Mean length of trained responses, of the whole run, over that of all that are worth it."""
    staleness_mean: float
    staleness_max: int
    """In the whole run."""
    staleness_histogram: dict[int, float]
    """Staleness -> share of trained responses."""


def account(records: Sequence[StepRecord], scenario: Scenario) -> Account:
    """Sums over a whole run, and over its middle."""
    trained = sum(record.trained_tokens for record in records)
    decoded = math.fsum(record.decoded_tokens for record in records)
    read = sum(record.read_tokens for record in records)
    mixed = sum(record.mixed_tokens for record in records)
    lengths = [length for record in records for length in record.lengths]
    used = records[scenario.warm_up_steps : len(records) - scenario.last_steps]
    seconds = math.fsum(record.seconds for record in used)
    staleness = Counter(stale for record in used for stale in record.staleness)
    number = staleness.total()
    slots = scenario.engines * scenario.slots * seconds
    return Account(
        generated_per_trained=decoded / trained,
        wasted_share=1 - trained * (read / mixed) / decoded,
        step_seconds=seconds / len(used),
        engines_idle=1 - math.fsum(record.slot_seconds for record in used) / slots,
        trainer_idle=1 - math.fsum(record.train_seconds for record in used) / seconds,
        length_ratio=sum(lengths) / len(lengths) / scenario.expected.trained_tokens,
        staleness_mean=sum(k * n for k, n in staleness.items()) / number,
        staleness_max=max(max(record.staleness) for record in records),
        staleness_histogram={k: n / number for k, n in sorted(staleness.items())},
    )


class ReferenceSampler:
    """The published recipe: whole waves of prompts, surplus groups discarded.

    Args:
        wave: prompts of a wave, in targets. 3 in the published run: 1,536 prompts for 512.
    """

    def __init__(
        self, scenario: Scenario, generate: Generate, take: TakePrompts, wave: int
    ) -> None:
        self._wave = wave
        self._scenario = scenario
        self._generate = generate
        self._take = take

    async def collect(self, step: int, policy_version: int) -> Brought:
        target = self._scenario.prompts_per_step
        read: list[Group] = []
        mixed: list[Group] = []
        events = 0
        while len(mixed) < target:
            prompts = self._take(self._wave * target)
            work = [
                self._group(prompt, step, events + index) for index, prompt in enumerate(prompts)
            ]
            events += len(prompts)
            read += await gather_or_cancel(work)
            mixed = [group for group in read if group.mixed]
        return Brought(mixed[:target], read)

    async def _group(self, prompt: Prompt, step: int, event: int) -> Group:
        work = [
            self._response(prompt, step, event, index) for index in range(self._scenario.group_size)
        ]
        responses = tuple(await gather_or_cancel(work))
        return Group(prompt, responses, tuple(grade(prompt, response) for response in responses))

    async def _response(self, prompt: Prompt, step: int, event: int, index: int) -> Response:
        seed = sample_seed(self._scenario.seed, step, event, index)
        request = GenerationRequest(
            prompt_token_ids=prompt.token_ids,
            seed=seed,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            max_tokens=self._scenario.max_blocks,
            stop_token_ids=(2,),
            request_id=f"reference-{step}-{event}-{index}",
        )
        result = await self._generate(request)
        return Response(
            prompt.id,
            index,
            result.token_ids,
            result.logprobs,
            result.finish_reason,
            result.policy_version,
            seed,
            version_spans=result.version_spans,
        )
