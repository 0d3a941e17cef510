"""An engine without a model: answers are a pure function of the request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_dapo.rollout.engine import EngineUnavailable, GenerationRequest, GenerationResult
from megatron_dapo.types import FinishReason, Prompt, Response, Reward

RIGHT, WRONG, STOP = 7, 8, 2


@dataclass
class FakeEngine:
    """Answers right with the probability that the prompt's first token names, in percent."""

    version: int = 0
    dies_after: int | None = None
    finish: Callable[[GenerationRequest], FinishReason] = lambda request: "stop"
    seconds: Callable[[GenerationRequest], float] = lambda request: 0.0
    requests: list[GenerationRequest] = field(default_factory=list)
    updated_after: int | None = None
    """Tokens of each response from `version`; the others come from the next one."""
    running: int = 0
    _waiting: set[asyncio.Future[None]] = field(default_factory=set)
    most_running: int = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if self.dies_after is not None and len(self.requests) >= self.dies_after:
            raise EngineUnavailable("dead")
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        interrupted = await self._interrupted_within(self.seconds(request))
        self.running -= 1
        draw = random.Random(request.seed)
        right = draw.random() * 100 < request.prompt_token_ids[0]
        filler = [draw.randrange(10, 100) for _ in range(draw.randrange(8))]
        tokens = (*filler, RIGHT if right else WRONG, STOP)
        finish = self.finish(request)
        if finish == "abort":
            tokens = tokens[:1]
        if interrupted:
            tokens, finish = tokens[: draw.randrange(len(tokens))], "abort"
        spans = [(0, self.version)] if tokens else []
        if self.updated_after is not None and len(tokens) > self.updated_after:
            spans.append((self.updated_after, self.version + 1))
        logprobs = tuple(-0.5 for _ in tokens)
        return GenerationResult(tokens, logprobs, finish, tuple(spans), self.version)

    async def interrupt(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def close(self) -> None:
        pass

    async def _interrupted_within(self, seconds: float) -> bool:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await asyncio.wait({waiting}, timeout=seconds)
            return waiting.done()
        finally:
            self._waiting.discard(waiting)


def grade(prompt: Prompt, response: Response) -> Reward:
    accuracy = float(RIGHT in response.token_ids)
    length = len(response.token_ids)
    return Reward(accuracy, 2 * accuracy - 1, overlong=-length / 100, parts={"tokens": length})


def decode(token_ids: object) -> str:
    return " ".join(map(str, token_ids))  # type: ignore[call-overload]


@dataclass
class Source:
    """Prompts whose difficulty goes round; remembers how many were asked for."""

    percents: tuple[int, ...]
    asked: list[int] = field(default_factory=list)
    given: int = 0

    def take(self, count: int) -> list[Prompt]:
        self.asked.append(count)
        prompts = []
        for _ in range(count):
            percent = self.percents[self.given % len(self.percents)]
            prompts.append(Prompt(f"p{self.given}", "", (percent, 5, self.given), "1"))
            self.given += 1
        return prompts

    def put_back(self, count: int) -> None:
        self.given -= count
