"""Prompts in, graded groups out: dynamic sampling as a stream (DAPO 3.2), ahead of training or not.

    drafts (prompts drawn) -> MemberSampler: engines, graders -> complete groups
           -> PrefixFilling or Streaming: which of them train, what is drawn next
           -> GroupScheduler: one step for each call of `collect`; what a checkpoint holds

Everything runs in one event loop and takes time from it alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from pydantic import JsonValue

from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.collected import Collected, collected_metrics, shortage
from megatron_dapo.rollout.draft import Draft
from megatron_dapo.rollout.draft_source import DraftSource, PromptSource
from megatron_dapo.rollout.engine import Generate, GenerationRequest
from megatron_dapo.rollout.grading import Grader, check_grading_errors
from megatron_dapo.rollout.member_sampler import EnginesLost, MemberSampler
from megatron_dapo.rollout.prefix_filling import PrefixFilling
from megatron_dapo.rollout.rollout_metrics import staleness_metrics
from megatron_dapo.rollout.sampler import RolloutStep, SamplingPlan
from megatron_dapo.rollout.scheduler_state import (
    ReadyStep,
    SchedulerState,
    goes_on_with_unfinished,
    state_to_json,
    usable_state,
)
from megatron_dapo.rollout.seeds import sample_seed
from megatron_dapo.rollout.streaming import Streaming

logger = logging.getLogger(__name__)


class GroupScheduler:
    """The groups of every step of a run.

    With `rollout.mode=sync` sampling happens inside `collect`. `one_step_off` samples the next
    step, whole and from the weights of that moment, while this one is trained on: `drain` comes
    before the weights change. `async` samples on, through training and updates.

    Args:
        generate: samples one response on some engine; EngineUnavailable once none is left.
        prompts: their order.
        grader: text and reward of a complete response.
        rollout: the section.
        sampling: the section.
        interrupt: ends all requests that run; they return what they have, finish reason "abort".
        seed: of the run; with step, draw, member and piece it fixes every sample.
        stop_token_ids: each ends a response.
        capacity: sequences that the living engines decode at once.
        last_step: nothing is sampled for steps behind it. None: there is no last one.
        max_error_share: share of a step's responses whose grader may fail.
        grading_failures: what the first graders that failed have said.
    """

    def __init__(
        self,
        generate: Generate,
        prompts: PromptSource,
        grader: Grader,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        *,
        interrupt: Callable[[], Awaitable[None]],
        seed: int,
        stop_token_ids: Sequence[int],
        capacity: Callable[[], int],
        last_step: int | None = None,
        max_error_share: float = 1.0,
        grading_failures: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._rollout = rollout
        self._sampling = sampling
        self._seed = seed
        self._stop_token_ids = tuple(stop_token_ids)
        self._last_step = last_step
        self._max_error_share = max_error_share
        self._grading_failures = grading_failures
        self._ahead: asyncio.Task[ReadyStep] | None = None
        self._taken_before_ahead = 0
        """Prompts that had been drawn when it began."""
        self._restored: ReadyStep | None = None
        """The step that had been sampled ahead of a checkpoint."""
        self._sampler = MemberSampler(
            generate,
            interrupt,
            grader,
            first_request=self._first_request,
            piece_seed=self._piece_seed,
            capacity=capacity,
            completed=lambda draft: self._way.completed(draft),
            has_room=lambda: self._way.room(),
        )
        source = self._source = DraftSource(prompts, rollout.group_size)
        self._way: PrefixFilling | Streaming
        if goes_on_with_unfinished(rollout, sampling):
            self._way = Streaming(
                self._sampler,
                source,
                rollout,
                sampling,
                background=rollout.mode == "async",
                last_step=last_step,
            )
        else:
            self._way = PrefixFilling(self._sampler, source, rollout, sampling, last_step=last_step)

    async def collect(self, step: int, policy_version: int) -> RolloutStep:
        """The groups that `step` trains on: exactly `rollout.prompts_per_step`, all mixed.

        Args:
            policy_version: of the weights that will be trained, and that the engines serve.

        Raises:
            NotEnoughGroups: `sampling.max_rounds` or `max_seconds` were not enough, and
                `sampling.when_short` is stop (or not one group was found).
            EnginesLost: no engine is left. What is finished is kept: called again for the same
                step, this goes on where it stood.
            TooManyGradingErrors: see reward.max_error_share.
            RuntimeError: an engine serves older weights than `policy_version`.
            EngineError: an engine failed for good.
        """
        done = False
        try:
            ready = await self._ready(step, policy_version)
            self._sample_ahead(step, policy_version)
            done = True
        except EnginesLost:
            done = True
            raise
        finally:
            if not done:
                await self.close()
        groups = tuple(draft.group for draft in ready.kept if draft.group is not None)
        metrics = {**ready.metrics, **staleness_metrics(groups, policy_version)}
        return RolloutStep(groups, ready.generated, ready.counts, metrics)

    async def drain(self) -> None:
        """Wait for everything that was begun; no new prompts are drawn meanwhile.

        With mode=one_step_off this comes before every update of the weights. A step that the loss
        of all engines halted begins anew after it, whole from the new weights. What else goes
        wrong is told by the next `collect`; the prompts of that step count as not drawn.
        """
        if self._ahead is not None:
            await asyncio.wait({self._ahead})
            await self._put_back_failed_ahead()
        else:
            await self._way.drain()

    async def interrupt(self) -> None:
        """End all requests with what they have; `go_on` or the next `collect` takes them up."""
        await self._sampler.interrupt()

    def go_on(self) -> None:
        """After `interrupt`: what waits is sampled on, where the mode lets it run by itself."""
        if self._rollout.mode == "async":
            self._sampler.go_on()
            self._way.room()

    async def settle(self, *, hurry: bool = False) -> None:
        """Bring everything into a state that can be saved: `state_dict`, then `go_on`.

        Args:
            hurry: wait for no response; what only waiting would save is sampled again later.
        """
        if self._sampling.unfinished == "continue":
            await self.interrupt()
        elif not hurry:
            await self.drain()
        elif self._ahead is not None and not self._ahead.done():
            await self._abandon_ahead()
        else:
            await self._put_back_failed_ahead()

    def snapshot(self) -> SchedulerState:
        """The state of this moment, between two calls of `collect`, for `state_to_json`.

        Costs nothing and ends nothing: tokens of responses that run are not in it, and would be
        sampled again.
        """
        open_drafts = [draft.copy() for draft in self._way.open]
        return SchedulerState(
            self._way.rate, [*self._way.ready], open_drafts, self._finished_ahead()
        )

    def state_dict(self) -> dict[str, JsonValue]:
        """What goes on after a restart, as JSON."""
        return state_to_json(self.snapshot())

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        """Go on where `state_dict` was taken; nothing is sampled before the next `collect`.

        Raises:
            DraftStateError: the state is damaged, or does not fit to this run.
        """
        saved = usable_state(state, self._rollout, self._sampling)
        self._way.restore(saved)
        self._restored = saved.ahead

    async def close(self) -> None:
        """End everything that runs."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.wait({self._ahead})
            self._ahead = None
        await self._sampler.close()

    @property
    def _round_prompts(self) -> int:
        return self._sampling.prompts_per_round or self._rollout.prompts_per_step

    async def _ready(self, step: int, version: int) -> ReadyStep:
        """The step, sampled ahead or now."""
        restored, self._restored = self._restored, None
        ahead, self._ahead = self._ahead, None
        if restored is not None:
            assert restored.step == step, f"step {restored.step} was sampled ahead, not {step}"
            return restored
        if ahead is not None and not (ahead.done() and isinstance(ahead.exception(), EnginesLost)):
            return await ahead
        return await self._sampled(step, version)

    async def _put_back_failed_ahead(self) -> None:
        """Where the step that was sampled ahead has failed, whatever is saved now begins with its
        prompts. Its error is kept for the next `collect`, unless another try may go well."""
        ahead = self._ahead
        error = None if ahead is None or not ahead.done() else ahead.exception()
        if isinstance(error, EnginesLost):
            await self._abandon_ahead()
        elif error is not None:
            await self._sampler.close()
            self._put_back_ahead()

    async def _abandon_ahead(self) -> None:
        """Forget the step that is sampled ahead; its prompts come again."""
        await self.close()
        self._put_back_ahead()

    def _put_back_ahead(self) -> None:
        self._way.abandon()
        self._source.put_back(self._source.taken - self._taken_before_ahead)

    async def _sampled(self, step: int, version: int) -> ReadyStep:
        collected = await self._way.collect(step, version)
        errors = check_grading_errors(
            collected.generated, self._max_error_share, self._grading_failures()
        )
        self._check_enough(collected)
        metrics = collected_metrics(collected, self._round_prompts)
        metrics["reward/errors"] = float(errors)
        return ReadyStep(step, collected.kept, collected.generated, collected.counts, metrics)

    def _finished_ahead(self) -> ReadyStep | None:
        """The next step, where it was sampled ahead."""
        ahead = self._ahead
        if ahead is None:
            return self._restored
        return None if not ahead.done() or ahead.exception() else ahead.result()

    def _sample_ahead(self, step: int, version: int) -> None:
        """With `step` handed out: what may be sampled meanwhile."""
        over = self._last_step is not None and step >= self._last_step
        if self._rollout.mode == "one_step_off" and not over:
            self._taken_before_ahead = self._source.taken
            self._ahead = asyncio.ensure_future(self._sampled(step + 1, version))

    def _check_enough(self, collected: Collected) -> None:
        target = self._rollout.prompts_per_step
        if len(collected.kept) == target:
            return
        error = shortage(collected, target, self._sampling)
        if self._sampling.when_short == "stop" or not collected.kept:
            raise error
        logger.warning("step %d trains on what there is: %s", collected.step, error)

    def _first_request(self, draft: Draft, member: int) -> GenerationRequest:
        plan = SamplingPlan(
            temperature=self._rollout.temperature,
            top_p=self._rollout.top_p,
            top_k=self._rollout.top_k,
            max_tokens=self._rollout.max_response_tokens,
            stop_token_ids=self._stop_token_ids,
            seed=self._seed,
            step=draft.step,
        )
        return plan.request(draft.prompt, draft.event, member)

    def _piece_seed(self, draft: Draft, member: int, pieces: int) -> int:
        return sample_seed(self._seed, draft.step, draft.event, member, piece=pieces)
