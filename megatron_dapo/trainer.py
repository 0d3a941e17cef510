"""The training step, told once (DAPO, arXiv 2503.14476).

Every rank runs `Trainer`. Global rank 0 also owns the rollouts: it samples, grades and filters
groups, turns rewards into advantages, and hands one `RolloutBatch` of plain tensors to all.
From there on every rank does the same, and only the last pipeline stage sees a loss.

    prompts -> groups of mixed accuracy -> RolloutBatch -> packed updates
            -> old log-probs, a critic's values -> gradient steps -> weights into the engines
            -> metrics
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from megatron_dapo import device
from megatron_dapo.batch.packing import pack_update, pad_multiple, split_updates
from megatron_dapo.batch.rollout_batch import build_rollout_batch, from_tensors
from megatron_dapo.checkpoint.commit import (
    CHECKPOINTS,
    newest_complete,
    step_folder,
    step_of,
)
from megatron_dapo.checkpoint.export import write_hf_folder
from megatron_dapo.checkpoint.state import holds_optimizer, load_checkpoint, save_checkpoint
from megatron_dapo.config import RunConfig
from megatron_dapo.evaluation.evaluate import evaluation_metrics
from megatron_dapo.evaluation.set_report import report_set, reports_json
from megatron_dapo.observability.metrics import MetricBag, reduce_bags
from megatron_dapo.observability.sinks import Sinks
from megatron_dapo.observability.timing import PhaseTimer
from megatron_dapo.parallel.collectives import broadcast_tensors
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.critic import CRITIC_METRICS, Critic
from megatron_dapo.policy.policy import POLICY_METRICS, Policy
from megatron_dapo.policy.trained_model import SkippedUpdates, TrainedModel
from megatron_dapo.resharding.open_bridge import WeightBridge
from megatron_dapo.resharding.sync_metrics import sync_metrics
from megatron_dapo.resharding.transfer import export_stream
from megatron_dapo.rollout.driver import RolloutDriver
from megatron_dapo.rollout.probe import Probe, check_probes, probe_batch
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.types import MicroBatch, RolloutBatch

logger = logging.getLogger(__name__)
HF_FOLDER = "hf"


@dataclass
class Trainer:
    """One rank's view of a run. `rollouts` and `sinks` exist on global rank 0 only, `critic` on
    every rank with advantage.estimator=gae."""

    config: RunConfig
    hf_config: PretrainedConfig
    parallel: ParallelContext
    policy: Policy
    critic: Critic | None
    bridge: WeightBridge
    rollouts: RolloutDriver | None
    sinks: Sinks | None
    skipped: SkippedUpdates
    policy_version: int = 0
    """Rollout steps that the weights have been trained for; stamped on every response."""
    save_and_stop: Event = field(default_factory=Event)
    """Set on any rank: all save after the running step and stop."""

    def run(self) -> bool:
        """Train from where the run directory stands to `training.steps`, then export.

        Returns:
            False when asked to save and stop before the last step; the run goes on from there.
        """
        first = self.resume() + 1
        if first > self.config.training.steps:  # stopped after its last checkpoint
            self.finish()
            return True
        self.sync_weights()
        heldout = self.evaluate(0) if first == 1 else {}
        if heldout and self.sinks is not None:
            self.sinks.log(0, heldout)
        for step in range(first, self.config.training.steps + 1):
            self.step(step)
            stop = self._stop_agreed()
            if stop or self._due(step, self.config.checkpoint.every):
                self.save(step)
            if stop and step < self.config.training.steps:
                logger.warning("asked to stop: step %d is saved", step)
                return False
        self.finish()
        return True

    def step(self, step: int) -> None:
        """One rollout step: prompts in, new weights in the engines out."""
        timer, bag = PhaseTimer(), MetricBag()
        with timer.phase("gen"):
            rollout = self.rollouts.collect(step, self.policy_version) if self.rollouts else None
        with timer.phase("adv"):
            batch = self._share(rollout)
            updates = self._pack(batch)
        with timer.phase("old_log_prob"):
            updates = [self._with_old_logprobs(update, bag) for update in updates]
        if self.critic is not None:
            with timer.phase("values"):
                updates = [self.critic.values(update) for update in updates]
            with timer.phase("adv"):
                updates = self.critic.advantages(updates)
            with timer.phase("update_critic"):
                self._train(self.critic, updates, step, bag)
        with timer.phase("update_actor"):
            self._train(self.policy, updates, step, bag)
        with timer.phase("weight_sync"):
            self.policy_version = step
            synced = self.sync_weights()
        with timer.phase("testing"):
            heldout = self.evaluate(step) if self._due(step, self.config.evaluation.every) else {}
        self._log(step, bag, rollout, synced | heldout, timer)

    def _share(self, rollout: RolloutStep | None) -> RolloutBatch:
        """The batch that global rank 0 makes of its groups, on every rank."""
        built = None if rollout is None else build_rollout_batch(rollout.groups, self.config)
        return self._broadcast(built)

    def _broadcast(self, batch: RolloutBatch | None) -> RolloutBatch:
        """The batch of global rank 0 on every rank, as plain tensors over the control group."""
        tensors = None if batch is None else batch.tensors()
        return from_tensors(broadcast_tensors(tensors, group=self.parallel.control_group))

    def _pack(self, batch: RolloutBatch) -> list[list[MicroBatch]]:
        """Packed micro-batches of this data rank, by update. Local: every rank plans the same."""
        rows_of_updates = split_updates(
            batch,
            self.config.training.responses_per_update,
            allow_partial=self.config.sampling.when_short == "train",
        )
        return [self._pack_update(batch, rows) for rows in rows_of_updates]

    def _pack_update(self, batch: RolloutBatch, rows: Tensor) -> list[MicroBatch]:
        layout = self.config.parallel
        return pack_update(
            batch,
            rows,
            dp_rank=self.parallel.dp_rank,
            dp_size=layout.data,
            tokens_per_micro_batch=self.config.training.tokens_per_micro_batch,
            pad_multiple=pad_multiple(
                layout.tensor,
                layout.context,
                layout.uses_sequence_parallel,
                self.config.precision.fp8,
            ),
            micro_batch_multiple=layout.pipeline if layout.virtual_pipeline else 1,
            min_micro_batches=layout.pipeline,
            cp_size=layout.context,
        )

    def _with_old_logprobs(self, update: Sequence[MicroBatch], bag: MetricBag) -> list[MicroBatch]:
        scored, metrics = self.policy.logprobs(update)
        bag.update(metrics.metrics)
        return scored

    def _train(
        self, model: TrainedModel, updates: Sequence[list[MicroBatch]], step: int, bag: MetricBag
    ) -> None:
        model.start_step(step)
        for update in [*updates] * self.config.training.epochs:
            result = model.update(update)
            bag.update(result.metrics.metrics)
            self.skipped.note(model.name, result)

    def sync_weights(self) -> dict[str, float]:
        """Engines serve this policy from here on, stamped with `policy_version`. Collective.

        What they hold is compared with what was sent, and what they compute with what the
        trainer computes; before both agree no request is let in. Returns metrics, on every rank
        how well they agree and on global rank 0 also what was moved.
        """
        payload = self.bridge.prepare(self.policy_version)
        device.release_cached_memory()  # engines of the same devices wake up
        if self.rollouts is not None:
            engines = range(self.config.rollout.engines)
            infos = [self.bridge.init_info(engine) for engine in engines]
            self.rollouts.start_update(infos, payload, self.policy_version)
        self.bridge.send(self.policy_version)
        expected = self.bridge.expected_digests()
        probes = None if self.rollouts is None else self.rollouts.finish_update(expected)
        agreement = self._check_probes(probes)
        moved = {}
        if self.rollouts is not None:
            self.rollouts.let_requests_in()
            moved = sync_metrics(self.rollouts.update_reports, self.bridge)
        self.bridge.acknowledged(self.policy_version)
        return agreement | moved

    def _check_probes(self, probes: Sequence[Probe] | None) -> dict[str, float]:
        """Score what the engines sampled; every rank stops where the two sides disagree."""
        if self.config.resharding.probe_tokens == 0:
            return {}
        batch = self._broadcast(None if probes is None else probe_batch(probes))
        packs = self._pack_update(batch, torch.arange(batch.num_responses))
        scored, _ = self.policy.logprobs(packs)
        return check_probes(batch, scored, self.config, self.parallel)

    def evaluate(self, step: int) -> dict[str, float]:
        """Accuracy on the held-out prompts, on global rank 0; {} elsewhere (they wait later)."""
        if self.rollouts is None or self.config.evaluation.every == 0:
            return {}
        groups = self.rollouts.sample_heldout(step, self.policy_version)
        reports = {name: report_set(found) for name, found in groups.items()}
        if self.sinks is not None:
            samples = self.config.evaluation.save_samples
            self.sinks.log_evaluation(step, groups, reports_json(reports), samples=samples)
        return evaluation_metrics(reports)

    def save(self, step: int) -> None:
        """A checkpoint of everything that going on from `step` needs. Collective."""
        state = {} if self.rollouts is None else self.rollouts.state_dict()
        save_checkpoint(
            self.config.run_dir / CHECKPOINTS,
            step,
            chunks=self.policy.chunks,
            optimizer=self.policy.optimizer,
            parallel=self.parallel,
            state=state,
            keep=self.config.checkpoint.keep,
            critic=self.critic,
        )

    def resume(self) -> int:
        """Load the newest complete checkpoint and return its step; 0 without one. Collective.

        Weights alone (from `megatron-dapo convert`) are a start at step 0, with a new optimizer.
        """
        checkpoint = self._checkpoint_to_resume()
        if checkpoint is None:
            return 0
        continues = holds_optimizer(checkpoint)
        restored = load_checkpoint(
            checkpoint,
            chunks=self.policy.chunks,
            optimizer=self.policy.optimizer if continues else None,
            parallel=self.parallel,
            critic=self.critic if continues else None,
        )
        if not continues:
            self.policy.weights_loaded()
            if self.critic is not None:
                self.critic.start_from(self.policy.chunks)
        elif self.rollouts is not None:
            self.rollouts.load_state_dict(restored.state)
        self.policy_version = restored.step
        logger.info("start from %s", checkpoint)
        return restored.step

    def _checkpoint_to_resume(self) -> Path | None:
        """What global rank 0 finds is what all load: a shared file system may lag."""
        folder = self.config.run_dir / CHECKPOINTS
        newest = newest_complete(folder) if self.parallel.rank == 0 else None
        found = torch.tensor(-1 if newest is None else step_of(newest))
        dist.broadcast(found, 0, group=self.parallel.control_group)
        return None if found < 0 else step_folder(folder, int(found))

    def finish(self) -> None:
        """Write the Hugging Face folder and the report. Collective."""
        if self.config.checkpoint.export_hf:
            stream = export_stream(self.policy.chunks, self.hf_config, self.parallel)
            write_hf_folder(
                stream,
                self.config.model.path,
                self.config.run_dir / HF_FOLDER,
                expected=stream.tensors,
                dtype=stream.dtype,
                tokenizer_folder=self.config.model.tokenizer,
                overwrite=True,
            )
        if self.sinks is not None:
            self.sinks.finish()

    def _stop_agreed(self) -> bool:
        """True on every rank once one was asked to stop. Communicates one integer."""
        asked = torch.tensor(int(self.save_and_stop.is_set()))
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.parallel.control_group)
        return bool(asked)

    def _due(self, step: int, every: int) -> bool:
        return step == self.config.training.steps or (every > 0 and step % every == 0)

    def _log(
        self,
        step: int,
        bag: MetricBag,
        rollout: RolloutStep | None,
        others: Mapping[str, float],
        timer: PhaseTimer,
    ) -> None:
        """Merge what all ranks saw (one collective) and write it, on global rank 0."""
        names = {**POLICY_METRICS, **CRITIC_METRICS}
        merged = reduce_bags(bag, names, self.parallel.control_group)
        if self.sinks is None or rollout is None:
            return
        trained = [
            len(group.prompt.token_ids) + len(response.token_ids)
            for group in rollout.groups
            for response in group.responses
        ]
        timing = timer.values()
        seconds = timing["timing_s/step"]
        performance = {
            "perf/total_num_tokens": float(sum(trained)),
            "perf/time_per_step": seconds,
            "perf/throughput": sum(trained) / seconds / self.config.parallel.world_size,
            "training/policy_version": float(self.policy_version),
        }
        metrics = merged.values() | rollout.metrics | dict(others) | timing | performance
        self.sinks.log(step, metrics)
        self.sinks.log_samples(step, rollout.groups)
