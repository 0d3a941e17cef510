"""Steps that take what is finished first, and lose nothing: what is unfinished goes on later.

Engines stay full. A step ends as soon as it has its groups; responses that still run are
interrupted and continued in the next step, or (rollout.mode=async) just run on through the update.
Long responses are therefore late, and not lost: the step waits for those that would become too old.
"""

from __future__ import annotations

import asyncio
import logging

from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.collected import Collected, Tally, drafts_of
from megatron_dapo.rollout.draft import Draft
from megatron_dapo.rollout.draft_source import DraftSource
from megatron_dapo.rollout.fill import is_usable
from megatron_dapo.rollout.keep_rate import KeepRate, spare_groups
from megatron_dapo.rollout.member_sampler import EnginesLost, MemberSampler
from megatron_dapo.rollout.scheduler_state import SchedulerState
from megatron_dapo.rollout.selection import select_groups
from megatron_dapo.rollout.staleness import must_finish, split_stale, too_old, waits_until

logger = logging.getLogger(__name__)


class Streaming:
    """Samples as long as the groups that wait would not become too old.

    What is submitted and not trained on are the groups of at most `rollout.max_staleness` later
    steps, and of the one that is being collected: what is drawn from the weights of now is then
    trained on before it is too old. How many of them are mixed is not known beforehand. Since what
    is too much is wasted, and what is too little is drawn a little later by engines that are full
    meanwhile, the bound counts more of them than are to be expected, by `spare_groups`. Nothing is
    drawn for steps behind the last one of the run; those of the last step itself are as many as
    are to be expected, since it waits for each that it lacks.

    Args:
        background: go on between two steps.
        last_step: of the run; None: there is no last one.
    """

    def __init__(
        self,
        sampler: MemberSampler,
        source: DraftSource,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        *,
        background: bool,
        last_step: int | None,
    ) -> None:
        self.ready: list[Draft] = []
        """Usable and not trained on yet."""
        self.open: list[Draft] = []
        """Not complete."""
        self.rate = KeepRate()
        self._sampler = sampler
        self._source = source
        self._rollout = rollout
        self._sampling = sampling
        self._background = background
        self._last_step = last_step
        self._read: list[Draft] = []
        self._read_usable = 0
        self._step = 0
        self._version = 0
        self._drawn = 0
        self._drawing = False
        self._collecting = False
        self._carried_in = 0
        self._stale = 0
        self._ended = 0
        self._ended_tokens = 0
        self._began = 0.0
        self._measured_from = 0.0

    async def collect(self, step: int, version: int) -> Collected:
        """The groups of `step`; called again after EnginesLost it goes on where it stood."""
        if step != self._step:
            self._begin(step, version)
        self._sampler.version = max(self._sampler.version, version)
        self._sampler.go_on()
        self._drawing = self._collecting = True
        self.room()
        timed_out = False
        while not (timed_out or self._done()):
            timed_out = not await waits_until(self._sampler.change(), self._deadline())
        self._drawing, self._collecting = self._background, False
        if not self._background:
            await self._sampler.interrupt()
        return self._finish(timed_out)

    def completed(self, draft: Draft) -> None:
        """The sampler has graded the last member of a draft."""
        self.open.remove(draft)
        self._read.append(draft)
        if is_usable(draft, self._sampling.dynamic):
            self._read_usable += 1
            if too_old(draft, self._version, self._rollout.max_staleness):
                self._stale += 1
            else:
                self.ready.append(draft)
        self.room()

    def room(self) -> None:
        """Draw prompts for what engines could start now."""
        while self._drawing and self._sampler.has_room and self._wants_more():
            (draft,) = self._source.draw(1, self._step, self._version)
            self._drawn += 1
            self.open.append(draft)
            self._sampler.submit(draft)

    async def drain(self) -> None:
        """Wait until nothing runs; no prompts are drawn meanwhile."""
        drawing, self._drawing = self._drawing, False
        try:
            while not self._sampler.idle:
                await self._sampler.change()
        except EnginesLost as error:
            logger.warning("%d groups stay unfinished: %s", len(self.open), error)
        self._drawing = drawing

    def _begin(self, step: int, version: int) -> None:
        self._began = asyncio.get_running_loop().time()
        if not (self._background and self._step):
            self._measured_from = self._began
        self.ready, stale = split_stale(self.ready, version, self._rollout.max_staleness)
        self._stale += len(stale)
        if self._sampler.idle:
            self._end_too_old(version)
        self._step, self._version = step, version

    def _end_too_old(self, version: int) -> None:
        """End unfinished groups that no step may train on: one before was out of time."""
        old = split_stale(self.open, version, self._rollout.max_staleness)[1]
        self._sampler.forget(old)
        self.open = [draft for draft in self.open if draft not in old]
        self._ended += len(old)
        self._ended_tokens += sum(draft.tokens for draft in old)

    def _wants_more(self) -> bool:
        if self._drawn >= self._most:
            return False
        later = self._later_steps
        waiting = len(self.ready) + self._rate * len(self.open)
        if later:
            waiting += spare_groups(len(self.open), self._rate)
        return waiting < (later + self._collecting) * self._rollout.prompts_per_step

    @property
    def _later_steps(self) -> int:
        """Steps behind this one that may train on what is drawn now."""
        allowed = self._rollout.max_staleness
        return allowed if self._last_step is None else min(allowed, self._last_step - self._step)

    @property
    def _most(self) -> int:
        """Prompts that one step may draw."""
        target = self._rollout.prompts_per_step
        rounds = self._sampling.max_rounds
        return rounds * (self._sampling.prompts_per_round or target)

    @property
    def _rate(self) -> float:
        if not self._sampling.dynamic:
            return 1.0
        target = self._rollout.prompts_per_step
        return self.rate.within(self._read_usable, len(self._read), target)

    def _done(self) -> bool:
        if not self.open and self._drawn >= self._most:
            return True
        staleness = self._rollout.max_staleness
        enough = len(self.ready) >= self._rollout.prompts_per_step
        return enough and not must_finish(self.open, self._version, staleness)

    def _deadline(self) -> float | None:
        seconds = self._sampling.max_seconds
        return None if seconds is None else self._began + seconds

    def _finish(self, timed_out: bool) -> Collected:
        """Take the oldest groups; everything else waits."""
        dynamic, target = self._sampling.dynamic, self._rollout.prompts_per_step
        dull = [draft for draft in self._read if not is_usable(draft, dynamic)]
        pool = sorted([*self.ready, *dull], key=lambda draft: draft.order)
        groups = [draft.group for draft in pool if draft.group is not None]
        selection = select_groups([groups], target, dynamic=dynamic)
        kept = drafts_of(selection.kept, pool)
        self.ready = [draft for draft in self.ready if draft not in kept]
        read = sorted(self._read, key=lambda draft: draft.order)
        if dynamic:
            self.rate = self.rate.learn(self._read_usable, len(read))
        tokens, continued = self._sampler.take_counts()
        now = asyncio.get_running_loop().time()
        tally = Tally(
            carried_in=self._carried_in,
            carried_out=len(self.ready),
            discarded_stale=self._stale,
            discarded_unfinished=self._ended,
            discarded_unfinished_tokens=self._ended_tokens,
            continued=continued,
            tokens=tokens,
            keep_rate=self.rate.value,
            seconds=now - self._measured_from,
        )
        self._read, self._read_usable, self._drawn = [], 0, 0
        self._stale = self._ended = self._ended_tokens = 0
        self._carried_in, self._measured_from = len(self.ready), now
        generated = tuple(draft.group for draft in read if draft.group is not None)
        return Collected(self._step, kept, generated, selection.counts, tally, timed_out)

    def abandon(self) -> None:
        """Nothing is sampled for one certain step."""

    def restore(self, saved: SchedulerState) -> None:
        """Go on with what a checkpoint holds, from the next step on."""
        self.rate, self.ready, self.open = saved.rate, [*saved.ready], [*saved.unfinished]
        self._carried_in = len(self.ready)
        self._sampler.hold()
        for draft in self.open:
            self._sampler.submit(draft)
