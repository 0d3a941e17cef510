"""The policy's weights in the engines: of every update, and of engines that come back.

Global rank 0 talks to the engines, all ranks send. Which engines an update is for is therefore
agreed on first, over the control group, which waits as long as an engine may need to start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_dapo import device
from megatron_dapo.batch.packing import pack_for_rank
from megatron_dapo.batch.rollout_batch import from_tensors
from megatron_dapo.config import RunConfig
from megatron_dapo.config.resharding_checks import VLLM_BACKENDS
from megatron_dapo.parallel.collectives import broadcast_tensors, raise_together
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.parallel.stop import on_any_rank
from megatron_dapo.policy.policy import Policy
from megatron_dapo.resharding.open_bridge import WeightBridge
from megatron_dapo.resharding.sync_metrics import sync_metrics
from megatron_dapo.resharding.transport import FAILURES
from megatron_dapo.rollout.driver import RolloutDriver
from megatron_dapo.rollout.event_loop import Interrupted
from megatron_dapo.rollout.probe import Probe, check_probes, probe_batch

ResultT = TypeVar("ResultT")
logger = logging.getLogger(__name__)

LEFT_OUT, KNOWN, FRESH = range(3)
"""What an update is to an engine: nothing; the next one; the first one after its restart."""


class EngineWeights:
    """One rank's part of it. Every rank calls every method, in the same order.

    Args:
        config: of the run.
        parallel: of this rank.
        policy: whose weights these are; it scores the probes.
        bridge: carries them.
        rollouts: owns the engines, on global rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        parallel: ParallelContext,
        policy: Policy,
        bridge: WeightBridge,
        rollouts: RolloutDriver | None,
    ) -> None:
        self._config, self._parallel = config, parallel
        self._policy, self._bridge, self._rollouts = policy, bridge, rollouts
        self._version = -1
        self._updates = -1
        """Optimizer updates of the policy when the version was prepared."""

    def sync(self, version: int) -> dict[str, float]:
        """All engines serve the policy from here on, stamped with `version`.

        What they hold is compared with what was sent, and what they compute with what the
        trainer computes; before both agree no request is let in. An engine that is lost on the
        way, or was before and is up again, gets the same by an update of its own.

        Returns:
            Metrics: on every rank how well they agree, on global rank 0 also what was moved.

        Raises:
            RuntimeError: an engine refused, holds or computes something else, or was lost more
                often than rollout.max_restarts.
        """
        self._bridge.prepare(version)
        self._version, self._updates = version, self._policy.updates
        device.release_cached_memory()  # engines of the same devices wake up
        metrics = self._bring(all_engines=True)
        self._bridge.acknowledged(version)
        return metrics

    def bring_back(self) -> None:
        """Engines that were lost serve the current version again; returns once one does.

        The policy must still be what `sync` brought: parameters are read again here.

        Raises:
            RuntimeError: as of `sync`.
        """
        assert self._policy.updates == self._updates, (
            f"the policy was updated {self._policy.updates - self._updates} times since version "
            f"{self._version} went to the engines; a restarted one would get other weights"
        )
        self._bring(all_engines=False)

    def _bring(self, *, all_engines: bool) -> dict[str, float]:
        metrics: dict[str, float] = {}
        while engines := self._agreed(all_engines):
            metrics = self._update(engines) | metrics
            all_engines = False  # from now on only those that were lost meanwhile
        return metrics

    def _agreed(self, all_engines: bool) -> dict[int, int]:
        """Engines that the next update is for, as global rank 0 sees it: KNOWN or FRESH."""
        places = torch.zeros(self._config.rollout.engines, dtype=torch.int64)

        def find(rollouts: RolloutDriver) -> None:
            try:
                for index, fresh in rollouts.to_update(all_engines=all_engines).items():
                    places[index] = FRESH if fresh else KNOWN
            except Interrupted:
                logger.warning("asked to stop: no engine is waited for")

        self._by_rank_0(find)
        dist.broadcast(places, 0, group=self._parallel.control_group)
        return {index: place for index, place in enumerate(places.tolist()) if place != LEFT_OUT}

    def _update(self, engines: dict[int, int]) -> dict[str, float]:
        """One update of these engines; metrics of it, {} when it came to nothing."""
        bridge, version = self._bridge, self._version
        for index, place in engines.items():
            if place == FRESH:
                bridge.rejoin(index)

        def start(rollouts: RolloutDriver) -> None:
            infos = {index: bridge.init_info(index) for index in engines}
            rollouts.start_update(infos, bridge.payload(), version)

        self._by_rank_0(start)
        everyone = len(engines) == self._config.rollout.engines
        try:
            bridge.send(version, None if everyone else list(engines))
        except FAILURES as error:  # on all ranks
            self._blame_lost_engines(error)
            return {}
        expected = bridge.expected_digests()
        probes = self._by_rank_0(lambda rollouts: rollouts.finish_update(expected))
        agreement = self._check_probes(probes or ())
        if self._rollouts is None:
            return agreement
        self._rollouts.let_requests_in()
        return agreement | sync_metrics(self._rollouts.update_reports, bridge)

    def _by_rank_0(self, work: Callable[[RolloutDriver], ResultT]) -> ResultT | None:
        """What `work` does with the engines, on global rank 0; where it fails all ranks raise."""
        result: ResultT | None = None
        failure: Exception | None = None
        if self._rollouts is not None:
            try:
                result = work(self._rollouts)
            except FAILURES as error:
                failure = error
        raise_together(failure, self._parallel.control_group)
        return result

    def _blame_lost_engines(self, failure: Exception) -> None:
        """Return when weights could not be sent because an engine was lost; else raise."""
        lost = self._by_rank_0(lambda rollouts: rollouts.abandon_update())
        # vLLM's own backends may still be waiting in a thread that nothing ends.
        restartable = self._config.resharding.transport not in VLLM_BACKENDS
        if not on_any_rank(bool(lost) and restartable, self._parallel.control_group):
            raise failure
        logger.warning("the weights are sent again once all engines are back: %s", failure)

    def _check_probes(self, probes: Sequence[Probe]) -> dict[str, float]:
        """Score what the engines sampled; every rank stops where the two sides disagree."""
        if not on_any_rank(bool(probes), self._parallel.control_group):
            return {}  # off, or no engine was left to sample one
        tensors = probe_batch(probes).tensors() if probes else None
        batch = from_tensors(broadcast_tensors(tensors, group=self._parallel.control_group))
        rows = torch.arange(batch.num_responses)
        packs = pack_for_rank(batch, rows, self._config, self._parallel)
        scored, _ = self._policy.logprobs(packs)
        return check_probes(batch, scored, self._config, self._parallel)
