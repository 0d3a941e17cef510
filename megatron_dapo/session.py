"""One rank from start to end: what it owns, opened in order of need and released in reverse."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch.distributed as dist
from pydantic import JsonValue
from transformers import PretrainedConfig

from megatron_dapo import device
from megatron_dapo.checkpoint.commit import CHECKPOINTS
from megatron_dapo.checkpoint.completion import RUN, is_complete, restore_run_record
from megatron_dapo.checkpoint.find import find_checkpoint
from megatron_dapo.checkpoint.header import read_state
from megatron_dapo.checkpoint.identity import check_identity, run_identity
from megatron_dapo.checkpoint.keeper import CheckpointKeeper
from megatron_dapo.checkpoint.run_lock import RunLock
from megatron_dapo.checkpoint.state import require_critic
from megatron_dapo.config import ConfigError, RunConfig
from megatron_dapo.config.endpoint_checks import missing_endpoints
from megatron_dapo.config.load import save_resolved
from megatron_dapo.config.pretrained import pretrained_config
from megatron_dapo.observability.run_files import read_run_record
from megatron_dapo.observability.sinks import Sinks
from megatron_dapo.observability.watchdog import Watchdog
from megatron_dapo.parallel.collectives import decided_by_rank_0
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.parallel.launch_env import LaunchEnv, init_process_group, read_launch_env
from megatron_dapo.parallel.stop import StopRequest
from megatron_dapo.policy.critic import Critic
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.trained_model import SkippedUpdates
from megatron_dapo.resharding.load import load_hf_weights
from megatron_dapo.resharding.open_bridge import open_bridge
from megatron_dapo.rollout.driver import RolloutDriver
from megatron_dapo.rollout.server_options import Device
from megatron_dapo.trainer import ROLLOUT, Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStart:
    """Where the ranks of a run stand once they have met, before anything is built."""

    config: RunConfig
    environment: LaunchEnv
    parallel: ParallelContext
    stop: StopRequest
    watchdog: Watchdog
    lock: RunLock | None
    """Of the run directory, on global rank 0."""
    start_from: Path | None
    """Verified checkpoint to go on from, the same on every rank."""
    complete: bool
    """Nothing is left to do; the same on every rank."""

    @property
    def is_rank_0(self) -> bool:
        return self.environment.rank == 0


def train(config: RunConfig, stop: StopRequest) -> bool:
    """Run the rank that the environment names; False when it saved and stopped before the end."""
    problems = list(missing_endpoints(config))
    if problems:
        raise ConfigError(problems)
    with open_run(config, read_launch_env(os.environ), stop) as run:
        if run.complete:
            steps = config.training.steps
            logger.warning("%s is already complete: %d steps are done", config.run_dir, steps)
            return True
        with open_parts(run) as trainer:
            decided_by_rank_0(lambda: _note_accepted(config), run.parallel.control_group)
            return trainer.run()


@contextmanager
def open_trainer(
    config: RunConfig, environment: LaunchEnv, stop: StopRequest | None = None
) -> Iterator[Trainer]:
    """This rank of a run that is not complete, ready to train; released whatever happens."""
    with open_run(config, environment, stop or StopRequest()) as run, open_parts(run) as trainer:
        yield trainer


@contextmanager
def open_run(config: RunConfig, environment: LaunchEnv, stop: StopRequest) -> Iterator[RunStart]:
    """The run directory, owned by global rank 0; all ranks met; the checkpoint to go on from.

    Every rank calls it. Global rank 0 decides what all of them do.

    Args:
        stop: hears this process's signals.

    Raises:
        ConfigError: another run lives in the directory, or it holds more steps than this run.
        RuntimeError: its checkpoints are damaged.
    """
    device.select(config.device, local_rank=environment.local_rank)
    with ExitStack() as stack:
        lock = None
        if environment.rank == 0:
            lock = stack.enter_context(RunLock(config.run_dir, os.environ))
        watchdog = Watchdog(
            config.run_dir / "logs",
            environment.rank,
            environment.world_size,
            config.parallel.stall_seconds,
        )
        stack.callback(watchdog.close)
        parallel = join_ranks(config, environment)
        stop.share(dist.distributed_c10d._get_default_store(), environment.world_size)
        stack.callback(parallel.destroy)
        control = parallel.control_group
        found = find_checkpoint(config.run_dir / CHECKPOINTS, control)
        complete = decided_by_rank_0(lambda: is_complete(config, found), control)
        yield RunStart(config, environment, parallel, stop, watchdog, lock, found, complete)


@contextmanager
def open_parts(run: RunStart) -> Iterator[Trainer]:
    """Everything that a rank owns, in order of need; released in reverse, whatever happens.

    Engines start first, on global rank 0: they load while Megatron does.

    Raises:
        ConfigError: on every rank: model, prompts or reward plug-in cannot be used, or are not
            those that the checkpoint was trained with.
    """
    config, parallel = run.config, run.parallel
    hf_config = pretrained_config(config.model)
    with ExitStack() as stack:
        rollouts, constants = _open_rollouts(run, stack)
        sinks = None
        if run.is_rank_0:
            sinks = stack.enter_context(closing(Sinks.open(config)))
            constants |= {RUN: dict(read_run_record(config.run_dir))}
        run.watchdog.start(None if rollouts is None else lambda: rollouts.responses)
        policy, critic = _build_models(config, hf_config, parallel)
        bridge = open_bridge(
            config,
            policy.chunks,
            hf_config,
            parallel,
            deliver=None if rollouts is None else rollouts.deliver,
            failure=None if rollouts is None else rollouts.update_failure,
        )
        stack.callback(bridge.close)
        if rollouts is not None:
            if bridge.directory is not None:
                rollouts.remove_when_orphaned(bridge.directory)
            rollouts.wait_ready()
        checkpoints = CheckpointKeeper(
            config.run_dir / CHECKPOINTS,
            config.checkpoint,
            parallel,
            policy.chunks,
            policy.optimizer,
            critic,
            constants,
            run.lock,
        )
        stack.callback(checkpoints.close)
        yield Trainer(
            config=config,
            hf_config=hf_config,
            parallel=parallel,
            policy=policy,
            critic=critic,
            bridge=bridge,
            rollouts=rollouts,
            sinks=sinks,
            skipped=SkippedUpdates(config.training.stop_after_skipped),
            watchdog=run.watchdog,
            checkpoints=checkpoints,
            start_from=run.start_from,
            stop=run.stop,
        )


def _note_accepted(config: RunConfig) -> None:
    """Write the configuration into the run directory: nothing has refused it."""
    try:
        save_resolved(config, config.run_dir)
    except OSError as error:
        raise ConfigError(f"run_dir={config.run_dir} cannot be written: {error}") from error


def _build_models(
    config: RunConfig, hf_config: PretrainedConfig, parallel: ParallelContext
) -> tuple[Policy, Critic | None]:
    """The policy with its start weights, and with advantage.estimator=gae a critic from them."""
    policy = Policy.build(config, hf_config, parallel)
    try:
        load_hf_weights(policy.chunks, hf_config, config.model.path, parallel)
    except ValueError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error
    policy.weights_loaded()
    if config.advantage.estimator != "gae":
        return policy, None
    critic = Critic.build(config, hf_config, parallel)
    critic.start_from(policy.chunks)
    return policy, critic


def _open_rollouts(
    run: RunStart, stack: ExitStack
) -> tuple[RolloutDriver | None, dict[str, JsonValue]]:
    """Rollouts that have been started, and what their checkpoints say of the run; on rank 0."""
    kind: Device = "cuda" if device.current().type == "cuda" else "cpu"
    opened: list[tuple[RolloutDriver, dict[str, JsonValue]]] = []

    def open_them() -> None:
        rollouts = RolloutDriver(run.config, device=kind)
        stack.callback(rollouts.close)
        identity = run_identity(run.config, rollouts.prompts_fingerprint)
        if run.start_from is not None:
            check_identity(run.start_from, identity)
            if run.config.advantage.estimator == "gae":
                require_critic(run.start_from)
            waiting = read_state(run.start_from, ROLLOUT)
            if waiting is not None:  # weights alone have none
                rollouts.check_state_dict(cast(dict[str, JsonValue], waiting))
            restore_run_record(run.config.run_dir, run.start_from)
        opened.append((rollouts, identity))

    decided_by_rank_0(open_them, run.parallel.control_group)
    for rollouts, _ in opened:
        rollouts.start()
    return opened[0] if opened else (None, {})


def join_ranks(config: RunConfig, environment: LaunchEnv) -> ParallelContext:
    """Meet the other ranks and cut the process groups. Every rank calls it once."""
    init_process_group(
        environment,
        timeout=timedelta(seconds=config.parallel.timeout_seconds),
        backend=device.backend(),
    )
    return ParallelContext.create(config.parallel, seed=config.seed)
