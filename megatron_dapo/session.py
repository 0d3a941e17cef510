"""One rank from start to end: what it owns, opened in order of need and released in reverse."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from transformers import AutoConfig

from megatron_dapo import device
from megatron_dapo.checkpoint.commit import CHECKPOINTS, MANIFEST_FILE, newest_complete, step_of
from megatron_dapo.config import ConfigError, RunConfig
from megatron_dapo.config.endpoint_checks import missing_endpoints
from megatron_dapo.observability.sinks import Sinks
from megatron_dapo.observability.watchdog import Watchdog
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.parallel.launch_env import LaunchEnv, init_process_group, read_launch_env
from megatron_dapo.parallel.stop import StopRequest
from megatron_dapo.policy.critic import Critic
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.trained_model import SkippedUpdates
from megatron_dapo.resharding.load import load_hf_weights
from megatron_dapo.resharding.open_bridge import open_bridge
from megatron_dapo.rollout.driver import RolloutDriver
from megatron_dapo.trainer import HF_FOLDER, Trainer

logger = logging.getLogger(__name__)


def train(config: RunConfig, stop: StopRequest) -> bool:
    """Run the rank that the environment names; False when it saved and stopped before the end."""
    if is_complete(config):
        steps = config.training.steps
        logger.warning("%s is already complete: %d steps are done", config.run_dir, steps)
        return True
    problems = list(missing_endpoints(config))
    if problems:
        raise ConfigError(problems)
    environment = read_launch_env(os.environ)
    with open_trainer(config, environment, stop) as trainer:
        return trainer.run()


def is_complete(config: RunConfig) -> bool:
    """True when the last step is saved and, where asked for, exported. Every rank sees the same."""
    checkpoint = newest_complete(config.run_dir / CHECKPOINTS)
    if checkpoint is None or step_of(checkpoint) < config.training.steps:
        return False
    exported = config.run_dir / HF_FOLDER / "config.json"
    return not config.checkpoint.export_hf or (
        exported.is_file()
        and exported.stat().st_mtime >= (checkpoint / MANIFEST_FILE).stat().st_mtime
    )


@contextmanager
def open_trainer(
    config: RunConfig, environment: LaunchEnv, stop: StopRequest | None = None
) -> Iterator[Trainer]:
    """Everything that a rank owns, in order of need; released in reverse, whatever happens.

    Engines start first, on global rank 0: they load while Megatron does.

    Args:
        stop: hears this process's signals; default: nothing asks the trainer to stop.
    """
    stop = stop or StopRequest()
    where = device.select(config.device, local_rank=environment.local_rank)
    kind: Literal["cpu", "cuda"] = "cuda" if where.type == "cuda" else "cpu"
    hf_config = AutoConfig.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    with ExitStack() as stack:
        rollouts = sinks = None
        if environment.rank == 0:
            rollouts = RolloutDriver(config, device=kind)
            stack.callback(rollouts.close)
            rollouts.start()
            sinks = Sinks.open(config)
            stack.callback(sinks.close)
        watchdog = Watchdog(
            config.run_dir / "logs",
            environment.rank,
            environment.world_size,
            config.parallel.stall_seconds,
        )
        stack.callback(watchdog.close)
        parallel = join_ranks(config, environment)
        watchdog.start(None if rollouts is None else lambda: rollouts.responses)
        stop.share(dist.distributed_c10d._get_default_store(), environment.world_size)
        stack.callback(parallel.destroy)
        policy = Policy.build(config, hf_config, parallel)
        try:
            load_hf_weights(policy.chunks, hf_config, config.model.path, parallel)
        except ValueError as error:
            raise ConfigError(f"model.path={config.model.path}: {error}") from error
        policy.weights_loaded()
        critic = None
        if config.advantage.estimator == "gae":
            critic = Critic.build(config, hf_config, parallel)
            critic.start_from(policy.chunks)
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
            stop=stop,
            watchdog=watchdog,
        )


def join_ranks(config: RunConfig, environment: LaunchEnv) -> ParallelContext:
    """Meet the other ranks and cut the process groups. Every rank calls it once."""
    init_process_group(
        environment,
        timeout=timedelta(seconds=config.parallel.timeout_seconds),
        backend=device.backend(),
    )
    return ParallelContext.create(config.parallel, seed=config.seed)
