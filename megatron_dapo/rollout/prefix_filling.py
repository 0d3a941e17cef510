"""Steps that are filled by the first groups in the order of prompts: the same on every machine.

Which groups train depends on seeds and prompts, never on which engine was faster: the shortest
prefix of the prompt order that holds enough mixed groups is taken. Taking what is finished first
would prefer short responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.collected import Collected, Tally, drafts_of
from megatron_dapo.rollout.draft import Draft
from megatron_dapo.rollout.draft_source import DraftSource
from megatron_dapo.rollout.fill import Fill, is_usable
from megatron_dapo.rollout.keep_rate import KeepRate
from megatron_dapo.rollout.member_sampler import MemberSampler
from megatron_dapo.rollout.scheduler_state import SchedulerState
from megatron_dapo.rollout.selection import select_groups
from megatron_dapo.rollout.staleness import split_stale, waits_until


class PrefixFilling:
    """Fills one step at a time; nothing runs between two.

    surplus=drop: what lies behind the prefix is ended and its prompts come again. surplus=carry:
    everything that was submitted is waited for, and mixed groups beyond the target wait for the
    next step. Refills are then asked for by the prefix alone, so that the set of groups is as
    independent of timing.

    Args:
        last_step: of the run. It is filled as with surplus=drop: no step trains on what it would
            carry on. None: there is no last one.
    """

    def __init__(
        self,
        sampler: MemberSampler,
        source: DraftSource,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        *,
        last_step: int | None,
    ) -> None:
        self.ready: list[Draft] = []
        """Carried to the next step, oldest first."""
        self.rate = KeepRate()
        self._sampler = sampler
        self._source = source
        self._rollout = rollout
        self._sampling = sampling
        self._last_step = last_step
        self._fill: Fill | None = None
        self._carried: list[Draft] = []
        self._carried_in = 0
        self._stale = 0

    @property
    def open(self) -> Sequence[Draft]:
        """Unfinished drafts of a step that was halted by the loss of all engines."""
        drafts = [] if self._fill is None else self._fill.drafts
        return [draft for draft in drafts if draft.group is None]

    async def collect(self, step: int, version: int) -> Collected:
        """The groups of `step`; called again after EnginesLost it goes on where it stood."""
        fill = self._fill or self._begin(step, version)
        assert fill.step == step, f"step {fill.step} was halted and is not over: not yet {step}"
        self._sampler.version = max(self._sampler.version, version)
        self._sampler.go_on()
        timed_out = False
        self._submit(fill, fill.missing())
        while not (timed_out or self._done(fill)):
            timed_out = not await waits_until(self._sampler.change(), self._deadline(fill))
            self._submit(fill, 0 if timed_out else fill.missing())
        collected = await self._finish(fill, timed_out)
        self._fill = None
        return collected

    def completed(self, draft: Draft) -> None:
        """The sampler has graded the last member of a draft."""
        assert self._fill is not None, "a draft was completed outside of any step"
        self._fill.note(draft)

    def room(self) -> None:
        """Engines have room: a step asks for what it lacks, not for what would keep them busy."""

    async def drain(self) -> None:
        """Nothing runs between two steps."""

    def abandon(self) -> None:
        """Forget the step that is being sampled; its prompts come again. Nothing may run."""
        if self._fill is not None:
            self._source.put_back(len(self._fill.drafts))
            self.ready = [*self._carried, *self.ready]
            self._fill = None

    def restore(self, saved: SchedulerState) -> None:
        """Go on with what a checkpoint holds (of `usable_state`), from the next step on."""
        self.rate, self.ready = saved.rate, [*saved.ready]

    def _carries(self, step: int) -> bool:
        last = self._last_step is not None and step >= self._last_step
        return self._sampling.surplus == "carry" and not last

    def _begin(self, step: int, version: int) -> Fill:
        target, dynamic = self._rollout.prompts_per_step, self._sampling.dynamic
        fresh, stale = split_stale(self.ready, version, self._rollout.max_staleness)
        self._carried_in, self._stale = len(self.ready), len(stale)
        self._carried, self.ready = fresh[:target], fresh[target:]
        need = target - len(self._carried)
        first, rounds = self._sampling.prompts_per_round, self._sampling.max_rounds
        self._fill = Fill(
            step=step,
            version=version,
            need=need,
            target=target,
            most=rounds * (first or target) if dynamic else need,
            rate=self.rate,
            first_wave=first if dynamic and need == target else None,
            dynamic=dynamic,
            by_prefix=self._carries(step),
            started=asyncio.get_running_loop().time(),
        )
        return self._fill

    def _submit(self, fill: Fill, count: int) -> None:
        if count:
            drafts = self._source.draw(count, fill.step, fill.version)
            fill.drafts += drafts
            for draft in drafts:
                self._sampler.submit(draft)

    def _done(self, fill: Fill) -> bool:
        if self._carries(fill.step) and fill.complete < len(fill.drafts):
            return False
        return fill.full or fill.exhausted

    def _deadline(self, fill: Fill) -> float | None:
        seconds = self._sampling.max_seconds
        return None if seconds is None else fill.started + seconds

    async def _finish(self, fill: Fill, timed_out: bool) -> Collected:
        """Choose, end what still runs, and put prompts back."""
        await self._sampler.interrupt(finish_grading=False)
        read = self._read(fill)
        last = fill.drafts.index(read[-1]) + 1 if read else 0
        behind = fill.drafts[last:]
        ended = [draft for draft in fill.drafts if draft.group is None]
        self._sampler.forget(ended)
        self._source.put_back(len(behind))
        pool = [*self._carried, *read]
        groups = [draft.group for draft in pool if draft.group is not None]
        dynamic = self._sampling.dynamic
        selection = select_groups([groups], fill.target, dynamic=dynamic)
        kept = drafts_of(selection.kept, pool)
        self.ready += [d for d in read if is_usable(d, dynamic) and d not in kept]
        if dynamic:
            self.rate = self.rate.learn(sum(is_usable(d, dynamic) for d in read), len(read))
        tokens, continued = self._sampler.take_counts()
        tally = Tally(
            carried_in=self._carried_in,
            carried_out=len(self.ready),
            put_back=len(behind),
            discarded_valid=sum(is_usable(draft, dynamic) for draft in behind),
            discarded_stale=self._stale,
            discarded_unfinished=sum(draft.group is None for draft in fill.drafts[:last]),
            discarded_unfinished_tokens=sum(draft.tokens for draft in ended),
            continued=continued,
            tokens=tokens,
            keep_rate=self.rate.value,
            seconds=asyncio.get_running_loop().time() - fill.started,
        )
        generated = tuple(draft.group for draft in read if draft.group is not None)
        return Collected(fill.step, kept, generated, selection.counts, tally, timed_out)

    def _read(self, fill: Fill) -> list[Draft]:
        """Complete drafts in the order of their prompts: all, or where nothing is carried on those
        up to the one that fills the step, so that every prompt behind it comes again."""
        complete = [draft for draft in fill.drafts if draft.group is not None]
        if self._carries(fill.step):
            return complete
        read: list[Draft] = []
        lacking = fill.need
        for draft in complete:
            if lacking == 0:
                break
            read.append(draft)
            lacking -= is_usable(draft, self._sampling.dynamic)
        return read
