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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import JsonValue
from transformers import PretrainedConfig

from megatron_dapo.batch.packing import pack_for_rank, split_updates
from megatron_dapo.batch.rollout_batch import build_rollout_batch, from_tensors
from megatron_dapo.checkpoint.completion import HF_FOLDER, note_completion
from megatron_dapo.checkpoint.export import write_hf_folder
from megatron_dapo.checkpoint.keeper import CheckpointKeeper
from megatron_dapo.config import RunConfig
from megatron_dapo.config.errors import RunFailed
from megatron_dapo.engine_weights import EngineWeights
from megatron_dapo.evaluation.evaluate import evaluation_metrics, ungraded_responses
from megatron_dapo.evaluation.set_report import report_set, reports_json
from megatron_dapo.observability.metrics import MetricBag, reduce_bags
from megatron_dapo.observability.sinks import Sinks
from megatron_dapo.observability.straggler import Stragglers
from megatron_dapo.observability.timing import PhaseTimer
from megatron_dapo.observability.watchdog import Watchdog
from megatron_dapo.parallel.collectives import broadcast_tensors, raise_together
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.parallel.stop import SignalsHeld, StopRequest, on_any_rank
from megatron_dapo.policy.critic import CRITIC_METRICS, Critic
from megatron_dapo.policy.failed_update import write_failed_update
from megatron_dapo.policy.policy import POLICY_METRICS, Policy
from megatron_dapo.policy.trained_model import SkippedUpdates, TrainedModel
from megatron_dapo.resharding.open_bridge import WeightBridge
from megatron_dapo.resharding.transfer import export_stream
from megatron_dapo.rollout.driver import RolloutDriver
from megatron_dapo.rollout.engine import EngineUnavailable
from megatron_dapo.rollout.event_loop import Interrupted
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.types import MicroBatch, RolloutBatch

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
ROLLOUT, TRAINER = "rollout", "trainer"
"""States of a checkpoint."""


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
    watchdog: Watchdog
    stragglers: Stragglers = field(default_factory=Stragglers, init=False)
    checkpoints: CheckpointKeeper
    start_from: Path | None
    """Verified checkpoint that the run goes on from."""
    policy_version: int = 0
    """Rollout steps that the weights have been trained for; stamped on every response."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Made on any rank: all save what is trained, and stop."""
    owed: bool = False
    """A stop cut the last step short after its updates: `_start` makes up for it."""
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last step, on global rank 0."""

    @cached_property
    def weights(self) -> EngineWeights:
        """Brings the policy into the engines."""
        return EngineWeights(self.config, self.parallel, self.policy, self.bridge, self.rollouts)

    def run(self) -> bool:
        """Train from where the run directory stands to `training.steps`, then export.

        Returns:
            False when asked to save and stop before the last step; the run goes on from there.
        """
        done = self.resume()
        if not steps_to_run(done, self.config.training.steps) and not self.owed:
            self.finish()  # stopped after its last checkpoint
            return True
        self._start(done)
        for step in steps_to_run(done, self.config.training.steps):
            before = None if self.rollouts is None else self.rollouts.snapshot()
            if not self.step(step):
                return self._leave(step - 1, {} if before is None else before())
            stop = self.stop.agreed(self.parallel.control_group)
            if stop or self._due(step, self.config.checkpoint.every):
                self.save(step, must_succeed=stop or step == self.config.training.steps)
            if stop and (step < self.config.training.steps or self.owed):
                return self._leave(step)
        self.finish()
        return True

    def _start(self, done: int) -> None:
        """Weights into the engines, and what is due of step `done` before the next one."""
        self.watchdog.enter(done, "weight_sync")
        synced = self.sync_weights()
        if done == 0:
            metrics = self.evaluate(0)
        elif self.owed:
            due = self._due(done, self.config.evaluation.every)
            metrics = synced | (self.evaluate(done) if due else {})
        else:
            metrics = {}
        self.owed = False
        if metrics and self.sinks is not None:
            self.sinks.log(done, metrics)
        self.stop.started(None if self.rollouts is None else self.rollouts.interrupt)

    def _leave(self, step: int, state: Mapping[str, JsonValue] | None = None) -> bool:
        """Stop after `step`, saved with the rollouts' `state` of then; False for `run`."""
        self.checkpoints.settle(wait=True)  # of the one under way: it may have failed
        if step > self.checkpoints.saved_step:
            self.save(step, state, must_succeed=True)
        logger.warning(
            "stopped: %s", f"step {step} is saved" if step else "nothing was trained yet"
        )
        return False

    def step(self, step: int) -> bool:
        """One rollout step: prompts in, new weights in the engines out.

        Returns:
            False when asked to stop before the first update: nothing of the step counts.
        """
        self.checkpoints.settle()
        if self.rollouts is not None:
            self.rollouts.forget_responses_before(self.checkpoints.saved_step)
        timer, bag = PhaseTimer(notify=partial(self.watchdog.enter, step)), MetricBag()
        with timer.phase("gen"):
            rollout = self._collect(step)
            if self.stop.agreed(self.parallel.control_group):
                return False
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
        with timer.phase("wait"):
            stop = self.stop.agreed(self.parallel.control_group)
        if stop:
            return False
        if self.critic is not None:
            with timer.phase("update_critic"):
                self._train(self.critic, updates, step, bag)
        with timer.phase("update_actor"):
            self._train(self.policy, updates, step, bag)
        with timer.phase("weight_sync"):
            self.policy_version = step
            self.owed = self.stop.agreed(self.parallel.control_group)
            synced = {} if self.owed else self.sync_weights()
        with timer.phase("testing"):
            due = not self.owed and self._due(step, self.config.evaluation.every)
            heldout = self.evaluate(step) if due else {}
            self.owed = on_any_rank(self.owed, self.parallel.control_group)
        self._log(step, bag, rollout, synced | heldout, timer)
        return True

    def _collect(self, step: int) -> RolloutStep | None:
        """The step's groups, on global rank 0; None there when a stop interrupts it."""
        return self._sampled(lambda rollouts: rollouts.collect(step, self.policy_version))

    def _sampled(self, sample: Callable[[RolloutDriver], ResultT]) -> ResultT | None:
        """What `sample` gives on global rank 0; None there when a stop interrupts it. Collective:
        once no engine is left, all ranks help to bring them back, and it goes on."""
        while True:
            found, lost = None, False
            failure: Exception | None = None
            try:
                found = None if self.rollouts is None else sample(self.rollouts)
            except Interrupted:
                logger.warning("asked to stop: sampling is cut short")
            except EngineUnavailable as error:
                logger.warning("%s", error)
                lost = True
            except (RuntimeError, OSError, ValueError) as error:
                failure = error
            raise_together(failure, self.parallel.control_group)
            if not on_any_rank(lost, self.parallel.control_group):
                return found
            self.watchdog.mark()
            self.weights.bring_back()

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
        return [pack_for_rank(batch, rows, self.config, self.parallel) for rows in rows_of_updates]

    def _with_old_logprobs(self, update: Sequence[MicroBatch], bag: MetricBag) -> list[MicroBatch]:
        self.watchdog.mark()
        scored, metrics = self.policy.logprobs(update)
        bag.update(metrics.metrics)
        return scored

    def _train(
        self, model: TrainedModel, updates: Sequence[list[MicroBatch]], step: int, bag: MetricBag
    ) -> None:
        model.start_step(step)
        for update in [*updates] * self.config.training.epochs:
            self.watchdog.mark()
            result = model.update(update)
            bag.update(result.metrics.metrics)
            dump = partial(write_failed_update, model, update, step)
            self.skipped.note(model.name, result, dump)

    def sync_weights(self) -> dict[str, float]:
        """Engines serve this policy from here on, stamped with `policy_version`. Collective."""
        return self.weights.sync(self.policy_version)

    def evaluate(self, step: int) -> dict[str, float]:
        """Accuracy on the held-out prompts, on global rank 0; {} elsewhere. Collective."""
        if self.config.evaluation.every == 0:
            return {}
        groups = self._sampled(lambda rollouts: rollouts.sample_heldout(step, self.policy_version))
        if groups is None:
            self.owed = self.rollouts is not None  # a stop cut it short
            return {}
        reports = {name: report_set(found) for name, found in groups.items()}
        failures = () if self.rollouts is None else self.rollouts.grading_failures
        if told := ungraded_responses(groups, failures):
            logger.warning("evaluation of step %d: %s", step, told)
        if self.sinks is not None:
            samples = self.config.evaluation.save_samples
            self.sinks.log_evaluation(step, groups, reports_json(reports), samples=samples)
        return evaluation_metrics(reports)

    def _rollout_state(self) -> Mapping[str, JsonValue]:
        return {} if self.rollouts is None else self.rollouts.state_dict()

    def save(
        self,
        step: int,
        state: Mapping[str, JsonValue] | None = None,
        *,
        must_succeed: bool = False,
    ) -> None:
        """A checkpoint of everything that going on from `step` needs. Collective.

        Args:
            state: of the rollouts after `step`; default: as they are.
            must_succeed: whatever checkpoint.on_failure says; then it is complete on return.
        """
        self.watchdog.enter(step, "saving")
        mine: dict[str, JsonValue] = {"owed": self.owed, "skipped": dict(self.skipped.in_a_row)}
        rollout = dict(self._rollout_state() if state is None else state)
        with SignalsHeld():
            self.checkpoints.save(
                step,
                {ROLLOUT: rollout, TRAINER: mine},
                metrics=self.last_metrics,
                must_succeed=must_succeed,
            )

    def resume(self) -> int:
        """Load the checkpoint that was chosen and return its step; 0 without one. Collective.

        Weights alone (from `megatron-dapo convert`) are a start at step 0, with a new optimizer.
        """
        if self.start_from is None:
            return 0
        restored, continues = self.checkpoints.restore(self.start_from)
        if continues:
            mine = cast(dict[str, Any], restored.state[TRAINER])
            self.owed = mine["owed"]
            self.skipped.in_a_row.update(mine["skipped"])
            if self.rollouts is not None:
                self.rollouts.load_state_dict(cast(dict[str, Any], restored.state[ROLLOUT]))
        else:
            self.policy.weights_loaded()
            if self.critic is not None:
                self.critic.start_from(self.policy.chunks)
        self.policy_version = restored.step
        logger.info("start from %s", self.start_from)
        return restored.step

    def finish(self) -> None:
        """Write the Hugging Face folder and the report. Collective.

        Raises:
            RunFailed: on global rank 0, where the folder cannot be written.
        """
        self.watchdog.enter(self.config.training.steps, "export")
        if self.config.checkpoint.export_hf:
            with SignalsHeld():
                self._export(self.config.run_dir / HF_FOLDER)
        if self.parallel.rank == 0:
            note_completion(self.config, self.checkpoints.saved_step)
        if self.rollouts is not None:
            self.rollouts.forget_responses_before(self.config.training.steps + 1)
        if self.sinks is not None:
            self.sinks.finish()

    def _export(self, folder: Path) -> None:
        stream = export_stream(self.policy.chunks, self.hf_config, self.parallel)
        try:
            write_hf_folder(
                stream,
                self.config.model.path,
                folder,
                expected=stream.tensors,
                dtype=stream.dtype,
                tokenizer_folder=self.config.model.tokenizer,
                overwrite=True,
            )
        except OSError as error:
            raise RunFailed(
                f"{folder} is not written: {error}. The last step is saved: make room, or repair "
                "what is named, and start the same command again"
            ) from error

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
        with timer.phase("wait"):
            merged = reduce_bags(bag, names, self.parallel.control_group)
        timing = timer.values()
        own = timing["timing_s/old_log_prob"]
        straggler = self.stragglers.compare(own, self.parallel.control_group)
        if self.sinks is None or rollout is None:
            return
        trained = [
            len(group.prompt.token_ids) + len(response.token_ids)
            for group in rollout.groups
            for response in group.responses
        ]
        seconds = timing["timing_s/step"]
        performance = {
            "perf/total_num_tokens": float(sum(trained)),
            "perf/time_per_step": seconds,
            "perf/straggler": straggler,
            "perf/throughput": sum(trained) / seconds / self.config.parallel.world_size,
            "training/policy_version": float(self.policy_version),
        }
        metrics = merged.values() | rollout.metrics | dict(others) | timing | performance
        self.last_metrics = metrics | self.checkpoints.metrics()
        self.sinks.log(step, self.last_metrics)
        self.sinks.log_samples(step, rollout.groups)


def steps_to_run(done: int, steps: int) -> range:
    """Rollout steps that are left of `training.steps` after `done` of them."""
    return range(done + 1, steps + 1)
