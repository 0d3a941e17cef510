"""Keeps engines full with the members of drafts, oldest first, and grades each once complete."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection

from megatron_dapo.rollout.continuation import joined, next_request, unfinished
from megatron_dapo.rollout.draft import Draft, Member
from megatron_dapo.rollout.engine import (
    EngineUnavailable,
    Generate,
    GenerationRequest,
    GenerationResult,
)
from megatron_dapo.rollout.grading import Grader
from megatron_dapo.types import Response

INTERRUPT_AGAIN_SECONDS = 1.0
"""A request that had not reached its engine when it was interrupted is so once more after this."""


class EnginesLost(EngineUnavailable):
    """No engine is left. What is finished is kept; once one is back, the work goes on."""


class MemberSampler:
    """Samples and grades what `submit` was given, until `interrupt`, `forget` or `close`.

    Lives in one event loop. A failure ends all of it; the loss of all engines only halts it.

    Args:
        generate: samples one response, on whichever engine; raises EngineUnavailable once there
            is none left.
        interrupt: makes every `generate` that runs return what it has, finish reason "abort".
        grader: reward of a complete response.
        first_request: of a member.
        piece_seed: of a member's later pieces, by (draft, member, pieces before).
        capacity: sequences that the engines decode at once.
        completed: called with each draft when its last member is graded.
        has_room: called when an engine could start a response and none waits.
    """

    def __init__(
        self,
        generate: Generate,
        interrupt: Callable[[], Awaitable[None]],
        grader: Grader,
        *,
        first_request: Callable[[Draft, int], GenerationRequest],
        piece_seed: Callable[[Draft, int, int], int],
        capacity: Callable[[], int],
        completed: Callable[[Draft], None],
        has_room: Callable[[], None],
    ) -> None:
        self.version = 0
        """Of the weights that the engines serve, at least."""
        self._tokens = 0
        self._continued = 0
        self._generate = generate
        self._interrupt = interrupt
        self._grader = grader
        self._first_request = first_request
        self._piece_seed = piece_seed
        self._capacity = capacity
        self._completed = completed
        self._has_room = has_room
        self._queue: deque[tuple[Draft, Member]] = deque()
        self._tasks: dict[asyncio.Task[None], tuple[Draft, Member]] = {}
        self._generating = 0
        self._interrupting = False
        self._held = False
        self._lost: EngineUnavailable | None = None
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Nothing runs, and nothing waits for an engine."""
        return not self._tasks and (self._held or not self._queue)

    @property
    def has_room(self) -> bool:
        """An engine could start a response right now, and none waits for that."""
        return not self._queue and not self._halted and self._generating < self._places

    def take_counts(self) -> tuple[int, int]:
        """Tokens sampled, and responses gone on with after an interruption, since the last time."""
        counts = self._tokens, self._continued
        self._tokens = self._continued = 0
        return counts

    def submit(self, draft: Draft) -> None:
        """Sample what the draft lacks, behind everything that was submitted before."""
        self._queue.extend((draft, member) for member in draft.members if not member.complete)
        self._fill()

    def hold(self) -> None:
        """Begin nothing before `go_on`."""
        self._held = True

    def go_on(self) -> None:
        """After an interruption, or once engines are there again: take up what waits."""
        self._held, self._lost = False, None
        self._queue = deque(sorted(self._queue, key=lambda pair: (pair[0].order, pair[1].index)))
        self._fill()

    async def change(self) -> None:
        """Wait until a draft is complete.

        Raises:
            EnginesLost: no engine is left; `go_on` takes up what waits.
            Exception: what a request or the grader failed with; nothing runs any more.
        """
        self.check()
        await self._changed.wait()
        self._changed.clear()
        self.check()

    def check(self) -> None:
        """Raise what went wrong since the last look, if anything did."""
        if self._failure is not None:
            raise self._failure
        if self._lost is not None and not self._tasks:
            raise EnginesLost(str(self._lost)) from self._lost

    async def interrupt(self, *, finish_grading: bool = True) -> None:
        """End all requests, which keep what they have, and wait for what is being graded.

        What is not complete waits for `go_on` or `forget`.

        Args:
            finish_grading: False where nobody asks for those rewards any more.
        """
        self._interrupting = self._held = True
        try:
            while self._tasks:
                if self._generating:
                    await self._interrupt()
                elif not finish_grading:
                    for task in self._tasks:
                        task.cancel()
                if self._tasks:
                    await asyncio.wait(self._tasks, timeout=INTERRUPT_AGAIN_SECONDS)
        finally:
            self._interrupting = False

    def forget(self, drafts: Collection[Draft]) -> None:
        """Drop these drafts from what waits; nothing of them may run."""
        gone = {id(draft) for draft in drafts}
        assert not any(id(draft) in gone for draft, _ in self._tasks.values()), "interrupt first"
        self._queue = deque(pair for pair in self._queue if id(pair[0]) not in gone)

    async def close(self) -> None:
        """Cancel everything and wait for its end."""
        self._queue.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _places(self) -> int:
        """At least one: a request is how the loss of all engines is found out."""
        return max(self._capacity(), 1)

    @property
    def _halted(self) -> bool:
        return self._held or self._lost is not None or self._failure is not None

    def _fill(self) -> None:
        while self._queue and not self._halted and self._generating < self._places:
            draft, member = self._queue.popleft()
            self._generating += 1
            task = asyncio.ensure_future(self._work(draft, member))
            self._tasks[task] = (draft, member)
            task.add_done_callback(self._ended)

    async def _work(self, draft: Draft, member: Member) -> None:
        first = self._first_request(draft, member.index)
        try:
            result = await self._sample(draft, member, first)
        except EngineUnavailable as error:
            self._lost = error
            self._queue.append((draft, member))
            return
        finally:
            self._generating -= 1
        self._tokens += len(result.token_ids)
        whole = joined(first, member.begun, result)
        if whole.finish_reason == "abort" and self._interrupting:
            member.begun = unfinished(whole, member.begun)
            self._queue.append((draft, member))
            return
        self._fill()
        if self.has_room:
            self._has_room()
        response = Response(
            prompt_id=draft.prompt.id,
            sample_index=member.index,
            token_ids=whole.token_ids,
            rollout_logprobs=whole.logprobs,
            finish_reason=whole.finish_reason,
            policy_version=whole.policy_version,
            seed=first.seed,
            version_spans=whole.version_spans,
        )
        member.response, member.reward = await self._grader(draft.prompt, response)
        member.begun = None

    async def _sample(
        self, draft: Draft, member: Member, first: GenerationRequest
    ) -> GenerationResult:
        expected, request = self.version, first
        if member.begun is not None:
            self._continued += 1
            seed = self._piece_seed(draft, member.index, member.begun.pieces)
            request = next_request(first, member.begun, seed)
        result = await self._generate(request)
        if result.policy_version < expected:  # newer: an update came meanwhile
            raise RuntimeError(
                f"a response of step {draft.step} came from policy version "
                f"{result.policy_version}, expected {expected}; update the weights of every "
                "engine before sampling"
            )
        return result

    def _ended(self, task: asyncio.Task[None]) -> None:
        draft, _ = self._tasks.pop(task)
        if task.cancelled():
            if not task.cancelling():  # by nobody here: waiting for it would never end
                self._fail(RuntimeError(f"a request for prompt {draft.prompt.id} was cancelled"))
            return
        error = task.exception()
        if error is not None:
            self._fail(error)
        elif draft.close_when_complete():
            self._completed(draft)
            self._changed.set()
        elif self._lost is not None and not self._tasks:
            self._changed.set()

    def _fail(self, error: BaseException) -> None:
        """The first failure is the one that is told; everything else ends."""
        if self._failure is None:
            self._failure = error
        self._queue.clear()
        for task in self._tasks:
            task.cancel()
        self._changed.set()
