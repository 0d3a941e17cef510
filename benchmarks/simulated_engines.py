"""Rollout engines, graders and a trainer without a model, for a `SimulatedLoop`.

Tokens are simulated in blocks: one token id stands for `BLOCK` tokens, so that a response of 20,480
tokens is a tuple of 320. A response begins with its plan: how long it becomes, and its identity,
which also says whether it is right. Whoever continues it reads the plan from its tokens, as a model
would keep to what it has begun, so a response is the same however often it was interrupted.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from statistics import NormalDist

from megatron_dapo.rollout.engine import EngineUnavailable, GenerationRequest, GenerationResult
from megatron_dapo.types import FinishReason, Prompt, Response, Reward

BLOCK = 64
"""Tokens that one simulated token stands for."""
FILLER, STOP = 9, 2
PROMPT_TOKENS = 3
"""(chance of a right answer in per mille, length of responses in per mille of the mean, number)"""
SHORTEST = 3
"""Blocks: length, identity, stop."""
ROUNDING = 1e-6
NORMAL = NormalDist()


@dataclass(frozen=True)
class SpeedLaw:
    """Seconds of an engine's work: a roofline of weights that are read and sequences on top."""

    step_seconds: float = 0.020
    """One decode step, whatever runs in it."""
    sequence_seconds: float = 0.00015
    """More for each sequence in it."""
    prefill_seconds: float = 0.00003
    """For each token that is read and not sampled; decoding stands still meanwhile."""

    def block_seconds(self, running: int) -> float:
        """Time in which each of `running` sequences gets `BLOCK` tokens."""
        return BLOCK * (self.step_seconds + self.sequence_seconds * running)


@dataclass(frozen=True)
class LengthLaw:
    """Lognormal response lengths, cut at the request's limit; sigmas of the logarithm."""

    median_tokens: float = 2000.0
    between_prompts: float = 0.5
    within_group: float = 0.75

    def blocks(self, per_mille: int, seed: int) -> int:
        """Length of one response, stop token included."""
        normal = NORMAL.inv_cdf(_uniform(seed, 1))
        tokens = self.median_tokens * per_mille / 1000 * math.exp(self.within_group * normal)
        return max(round(tokens / BLOCK), SHORTEST)


def simulated_prompts(
    number: int, keep_rate: float, group_size: int, lengths: LengthLaw, seed: int = 0
) -> tuple[Prompt, ...]:
    """Prompts of which a share of `keep_rate` is expected to bring groups of mixed accuracy.

    The chance of a right answer follows a symmetric beta distribution over the prompts, most of
    them near 0 or 1 where the rate is low. Neither it nor the answer has to do with the length.
    """
    alpha = beta_for(keep_rate, group_size)
    draw = random.Random(seed)
    prompts = []
    for index in range(number):
        right = round(1000 * draw.betavariate(alpha, alpha))
        length = round(1000 * math.exp(lengths.between_prompts * draw.gauss()))
        prompts.append(Prompt(str(index), "", (right, max(length, 1), index), "1"))
    return tuple(prompts)


def mixed_share(prompt: Prompt, group_size: int) -> float:
    """Chance that a group of this prompt has right and wrong answers."""
    right = prompt.token_ids[0] / 1000
    return 1 - right**group_size - (1 - right) ** group_size


def beta_for(keep_rate: float, group_size: int) -> float:
    """Both parameters of the beta distribution whose groups are mixed at this rate."""
    low, high = 1e-4, 1e4
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        # E[p^n] of a symmetric beta distribution; all right and all wrong are equally likely.
        equal = math.prod((middle + i) / (2 * middle + i) for i in range(group_size))
        low, high = (middle, high) if 1 - 2 * equal < keep_rate else (low, middle)
    return low


def grade(prompt: Prompt, response: Response) -> Reward:
    """Right with the chance that the prompt names; decided by who the response is."""
    accuracy = float(1000 * _uniform(identity(response), 2) < prompt.token_ids[0])
    return Reward(accuracy, 2 * accuracy - 1)


def decode(token_ids: Sequence[int]) -> str:
    """Nothing reads the text."""
    return ""


def identity(response: Response) -> int:
    """Which draw a response is: no two draws of a run are equal, whoever continued them."""
    return response.token_ids[1]


class _Sequence:
    """One request inside an engine."""

    __slots__ = ("blocks", "future", "marks", "plan", "reason", "request", "start")

    def __init__(
        self,
        request: GenerationRequest,
        lengths: LengthLaw,
        future: asyncio.Future[GenerationResult],
    ) -> None:
        self.request = request
        self.future = future
        known = request.prompt_token_ids[PROMPT_TOKENS:]
        total = known[0] if known else lengths.blocks(request.prompt_token_ids[1], request.seed)
        name = known[1] if len(known) > 1 else request.seed
        self.plan = (total, name, *[FILLER] * (total - SHORTEST), STOP)[len(known) :]
        self.reason: FinishReason = "stop" if len(self.plan) <= request.max_tokens else "length"
        self.blocks = min(len(self.plan), request.max_tokens)
        self.start = 0.0
        """Progress of the engine when this one began."""
        self.marks: list[tuple[int, int]] = []

    def result(self, blocks: int, reason: FinishReason, serving: int) -> GenerationResult:
        spans = tuple(mark for mark in self.marks if mark[0] < blocks)
        oldest = min((version for _, version in spans), default=serving)
        return GenerationResult(
            self.plan[:blocks], (-0.5,) * blocks, reason, spans if blocks else (), oldest
        )


class SimulatedEngine:
    """`Engine` whose sequences all advance at the speed that their number allows.

    Args:
        number: in messages.
        slots: sequences that it decodes at once; others wait inside of it, in order.
        keep_in_flight: an update finds running sequences stand still, and they go on with the new
            weights after their cache was filled again; False: it waits for their end.
    """

    def __init__(
        self,
        number: int,
        slots: int,
        *,
        speed: SpeedLaw | None = None,
        lengths: LengthLaw | None = None,
        keep_in_flight: bool = False,
        version: int = 0,
    ) -> None:
        self.number = number
        self.slots = slots
        self.keep_in_flight = keep_in_flight
        self.version = version
        self.decoded_blocks = 0.0
        """Sampled so far, what was thrown away later included."""
        self.slot_seconds = 0.0
        """Time that slots spent on sequences, summed over slots."""
        self._speed = speed or SpeedLaw()
        self._lengths = lengths or LengthLaw()
        self._factor = 1.0
        self._failure: str | None = None
        self._frozen = False
        self._serving = asyncio.Event()
        self._serving.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._waiting: deque[_Sequence] = deque()
        self._running: set[_Sequence] = set()
        self._ends: list[tuple[float, int, _Sequence]] = []
        """Heap of the progress at which each running sequence ends; gone ones may be among them."""
        self._order = count()
        self._progress = 0.0
        """Blocks that a sequence running from the start would have."""
        self._seen = 0.0
        """Time up to which progress is counted."""
        self._prefilled = 0.0
        """Time until which this engine only reads."""
        self._timer: asyncio.TimerHandle | None = None
        self._planned = False

    @property
    def running(self) -> int:
        """Sequences that are being decoded."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """False once it has died; a hung one seems alive."""
        return self._failure is None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample one response, as simulated.

        Raises:
            EngineUnavailable: it has died, or does so meanwhile.
        """
        while not self._serving.is_set():
            await self._serving.wait()
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        sequence = _Sequence(request, self._lengths, asyncio.get_running_loop().create_future())
        self._waiting.append(sequence)
        self._empty.clear()
        self._plan_soon()
        try:
            return await sequence.future
        finally:
            if not sequence.future.done() or sequence.future.cancelled():
                self._remove(sequence)

    async def update(self, version: int, seconds: float) -> None:
        """New weights in `seconds`, during which nothing is decoded and new requests wait."""
        self._serving.clear()
        if not self.keep_in_flight:
            await self._empty.wait()
        self._count_progress()
        self._frozen = True
        await asyncio.sleep(seconds)
        self._count_progress()
        self._frozen = False
        self.version = version
        for sequence in self._running:
            done = self._blocks_of(sequence)
            if sequence.marks[-1][0] == done:
                sequence.marks.pop()
            sequence.marks.append((done, version))
            self._read(len(sequence.request.prompt_token_ids) + done)
        self._serving.set()
        self._plan_soon()

    async def interrupt(self) -> None:
        """End what runs now; each request returns the tokens that it has."""
        self._count_progress()
        running, waiting = list(self._running), list(self._waiting)
        self._running.clear()
        self._waiting.clear()
        self._ends.clear()
        for sequence in running + waiting:
            done = self._blocks_of(sequence) if sequence.marks else 0
            self._finish(sequence, done, "abort")
        self._plan_soon()

    def die(self, message: str = "killed") -> None:
        """Every request, running or to come, ends in `EngineUnavailable`."""
        self._count_progress()
        self._failure = f"simulated engine {self.number}: {message}"
        for sequence in (*self._running, *self._waiting):
            if not sequence.future.done():
                sequence.future.set_exception(EngineUnavailable(self._failure))
        self._running.clear()
        self._waiting.clear()
        self._ends.clear()
        self._empty.set()
        self._serving.set()

    async def hang(self, noticed_after_seconds: float) -> None:
        """Nothing is answered any more, until someone notices and ends the engine."""
        self._count_progress()
        self._frozen = True
        await asyncio.sleep(noticed_after_seconds)
        self.die("hung, no heartbeat")

    def slow_down(self, factor: float) -> None:
        """From now on everything takes `factor` times as long."""
        self._count_progress()
        self._factor = factor
        self._plan_soon()

    def count_up_to_now(self) -> None:
        """Bring `decoded_blocks` and `slot_seconds` up to date."""
        self._count_progress()

    async def close(self) -> None:
        """Nothing to release."""

    def _count_progress(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._running and not self._frozen:
            self.slot_seconds += len(self._running) * (now - self._seen)
            decoding = now - max(self._seen, min(self._prefilled, now))
            blocks = decoding / (self._factor * self._speed.block_seconds(len(self._running)))
            self._progress += blocks
            self.decoded_blocks += blocks * len(self._running)
        self._seen = now

    def _plan_soon(self) -> None:
        """Many changes of one moment are planned for once."""
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Finish what is done, start what waits, and set the timer of the next end."""
        self._planned = False
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._count_progress()
        if self._frozen or self._failure is not None:
            return
        while self._ends and self._ends[0][0] <= self._progress + ROUNDING:
            sequence = heapq.heappop(self._ends)[2]
            if sequence in self._running:
                self._running.remove(sequence)
                self._finish(sequence, sequence.blocks, sequence.reason)
        while self._waiting and len(self._running) < self.slots:
            self._start(self._waiting.popleft())
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        if self._ends:
            left = max(self._ends[0][0] - self._progress, 0.0)
            seconds = left * self._factor * self._speed.block_seconds(len(self._running))
            self._timer = loop.call_at(max(loop.time(), self._prefilled) + seconds, self._advance)

    def _start(self, sequence: _Sequence) -> None:
        sequence.start = self._progress
        sequence.marks.append((0, self.version))
        self._running.add(sequence)
        heapq.heappush(self._ends, (self._progress + sequence.blocks, next(self._order), sequence))
        self._read(len(sequence.request.prompt_token_ids))

    def _read(self, blocks: int) -> None:
        """Fill the cache with what is known already; the short prompts themselves cost nothing."""
        known = blocks - PROMPT_TOKENS
        if known > 0:
            now = asyncio.get_running_loop().time()
            seconds = self._factor * self._speed.prefill_seconds * known * BLOCK
            self._prefilled = max(self._prefilled, now) + seconds

    def _blocks_of(self, sequence: _Sequence) -> int:
        """Whole blocks that a running sequence has; never all, it would have finished."""
        return min(int(self._progress - sequence.start + ROUNDING), sequence.blocks - 1)

    def _finish(self, sequence: _Sequence, blocks: int, reason: FinishReason) -> None:
        if not sequence.future.done():
            sequence.future.set_result(sequence.result(blocks, reason, self.version))
        if not self._running and not self._waiting:
            self._empty.set()

    def _remove(self, sequence: _Sequence) -> None:
        """Whoever asked for it has gone away."""
        self._count_progress()
        self._running.discard(sequence)
        if not sequence.marks and sequence in self._waiting:
            self._waiting.remove(sequence)
        if not self._running and not self._waiting:
            self._empty.set()
        self._plan_soon()


def _uniform(seed: int, stream: int) -> float:
    """A number inside (0, 1) that seed and stream fix (splitmix64)."""
    state = (seed + stream * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return ((state ^ (state >> 31)) + 0.5) / 2**64
