"""Save and restore everything that an exact resume needs; any layout loads any other's.

Weights and optimizer are a distributed checkpoint, which is cut anew for the layout that loads it.
Counters and positions are JSON. Random states belong to ranks, so they come back only in the layout
that saved them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from pydantic import JsonValue

from megatron_dapo import device
from megatron_dapo.checkpoint.commit import TENSORS, step_folder
from megatron_dapo.checkpoint.find import damage_found_together
from megatron_dapo.checkpoint.header import (
    HEADER_FILE,
    Header,
    Score,
    read_header,
    read_states,
    state_files,
)
from megatron_dapo.checkpoint.pickled_parts import refuse_code
from megatron_dapo.checkpoint.random_states import (
    dump_random_states,
    random_file,
    restore_random_states,
)
from megatron_dapo.checkpoint.save import StagedSave, write_save
from megatron_dapo.checkpoint.tensors import stage_tensors
from megatron_dapo.config import ConfigError
from megatron_dapo.config.checkpoint import CheckpointConfig
from megatron_dapo.parallel.context import ParallelContext

device.install_cpu_support()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer  # noqa: E402

logger = logging.getLogger(__name__)

CRITIC = "critic"


class Critic(Protocol):
    """What is kept of a `policy.critic.Critic`."""

    chunks: list[GPTModel]
    optimizer: ChainedOptimizer


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds beside the tensors, which are in place already."""

    step: int
    state: dict[str, JsonValue]
    random_states: bool
    """True when each rank has its own random states back."""


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    chunks: Sequence[GPTModel],
    optimizer: ChainedOptimizer | None,
    state: Mapping[str, JsonValue],
    parallel: ParallelContext,
    keep: int,
    critic: Critic | None = None,
) -> Path:
    """Write `folder/step_N` completely or not at all, then delete the oldest beyond `keep`.

    Every rank calls it, on a file system that all share; the arguments are `stage_save`'s.

    Raises:
        CheckpointError: on every rank, when one could not write.
    """
    staged = stage_save(
        folder,
        step,
        chunks=chunks,
        optimizer=optimizer,
        state=state,
        parallel=parallel,
        critic=critic,
        copy=False,
    )
    write_save(staged, CheckpointConfig(keep=keep), parallel.control_group)
    return step_folder(folder, step)


def stage_save(
    folder: Path,
    step: int,
    *,
    chunks: Sequence[GPTModel],
    optimizer: ChainedOptimizer | None,
    state: Mapping[str, JsonValue],
    parallel: ParallelContext,
    copy: bool,
    critic: Critic | None = None,
    score: Score | None = None,
) -> StagedSave:
    """What this rank will write of a checkpoint of now. Every rank calls it.

    Megatron gathers the optimizer's shards over the data ranks; plans go to rank 0.

    Args:
        chunks: this rank's model chunks, unwrapped.
        optimizer: None saves the weights alone.
        state: counters, positions, schedules by name; rank 0's are written, a file each.
        copy: hold all tensors a second time, so that they may change before they are written.
        critic: of PPO, with its optimizer; into a folder of its own.
        score: what `checkpoint.keep_best` compares.
    """
    group = parallel.control_group
    tensors = {TENSORS: stage_tensors(_sharded_state(chunks, optimizer), group=group, copy=copy)}
    if critic is not None:
        parts = _sharded_state(critic.chunks, critic.optimizer)
        tensors[CRITIC] = stage_tensors(parts, group=group, copy=copy)
    files = {random_file(parallel.rank): dump_random_states()}
    if parallel.rank == 0:
        optimizers = 0 if optimizer is None else len(optimizer.chained_optimizers)
        header = Header(step, _layout(parallel, len(chunks)), optimizers, score)
        files |= {HEADER_FILE: header.text().encode(), **state_files(state)}
    return StagedSave(folder, step, tensors, files)


def load_checkpoint(
    checkpoint: Path,
    *,
    chunks: Sequence[GPTModel],
    optimizer: ChainedOptimizer | None,
    parallel: ParallelContext,
    critic: Critic | None = None,
    verify: bool = True,
) -> Restored:
    """Fill weights, optimizer and random states from `checkpoint`, whatever layout wrote it.

    Every rank calls it with freshly built parts. Each rank reads the slices that it holds.

    Args:
        optimizer: None takes the weights alone.
        critic: None leaves a saved one where it is.
        verify: compare all files with their digests first; `find_checkpoint` has done that.

    Raises:
        RuntimeError: on every rank: the checkpoint is incomplete or damaged.
        ConfigError: another version of this package wrote it in another format; reading it might
            run foreign code; its optimizer cannot be cut for this layout; or it has no critic.
    """
    faults = damage_found_together(checkpoint, parallel.control_group) if verify else []
    if faults:
        raise RuntimeError(f"checkpoint {checkpoint} is damaged: {faults[0]}; take another step")
    header = read_header(checkpoint)
    if optimizer is not None:
        _check_optimizers(header.optimizers, optimizer, checkpoint)
    if critic is not None:
        require_critic(checkpoint)
    refuse_code(checkpoint / TENSORS)
    _load_tensors(checkpoint / TENSORS, chunks, optimizer)
    if critic is not None:
        refuse_code(checkpoint / CRITIC)
        _load_tensors(checkpoint / CRITIC, critic.chunks, critic.optimizer)
    same_layout = header.layout == _layout(parallel, len(chunks))
    if same_layout:
        restore_random_states(checkpoint / random_file(parallel.rank))
    elif parallel.rank == 0 and optimizer is not None:
        logger.warning(
            "%s was saved by layout %s: random states start anew", checkpoint, header.layout
        )
    dist.barrier(group=parallel.control_group)
    return Restored(header.step, read_states(checkpoint), same_layout)


def require_critic(checkpoint: Path) -> None:
    """Refuse to resume a critic from a checkpoint without one.

    Raises:
        ConfigError: it holds an optimizer, but no critic.
    """
    if holds_optimizer(checkpoint) and not (checkpoint / CRITIC).is_dir():
        raise ConfigError(
            f"advantage.estimator=gae: {checkpoint} holds no critic, it was saved with another "
            "estimator. Resume with that one, or start from its weights in a new run_dir"
        )


def holds_optimizer(checkpoint: Path) -> bool:
    """False for weights alone: what `megatron-dapo convert` writes."""
    return read_header(checkpoint).optimizers > 0


def _metadata() -> dict[str, object]:
    """Format of the optimizer's tensors. A new dict each call: Megatron keeps groups in it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def _load_tensors(
    folder: Path, chunks: Sequence[GPTModel], optimizer: ChainedOptimizer | None
) -> None:
    state = _sharded_state(chunks, optimizer, loading=True)
    loaded = dist_checkpointing.load(state, str(folder))
    for key, chunk in zip(_chunk_keys(chunks), chunks, strict=True):
        chunk.load_state_dict(loaded[key])
    if optimizer is not None:
        _load_optimizer(optimizer, loaded["optimizer"])


def _chunk_keys(chunks: Sequence[GPTModel]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _sharded_state(
    chunks: Sequence[GPTModel], optimizer: ChainedOptimizer | None, *, loading: bool = False
) -> dict[str, object]:
    state: dict[str, object] = {
        key: chunk.sharded_state_dict(metadata=_metadata())
        for key, chunk in zip(_chunk_keys(chunks), chunks, strict=True)
    }
    if optimizer is not None:
        _allocate_adam_state(optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=_metadata()
        )
    if not loading:
        state["content_metadata"] = _metadata()
    return state


def _parts(optimizer: ChainedOptimizer) -> list[MegatronOptimizer]:
    """Optimizers that hold parameters: one, or dense and expert."""
    return [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def _allocate_adam_state(optimizer: ChainedOptimizer) -> None:
    """Give torch's Adam its state before the first step: Megatron reads it to save and load."""
    for part in _parts(optimizer):
        if not isinstance(part.optimizer, torch.optim.Adam):
            continue  # Transformer Engine's and apex's are allocated by Megatron
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if not part.optimizer.state[parameter]:
                    part.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _load_optimizer(optimizer: ChainedOptimizer, loaded: dict) -> None:
    """Load each part, and give each parameter of torch's Adam its own step counter.

    Megatron hands all parameters one shared tensor; Adam would advance it once for each of
    them, which spoils the bias correction without an error.
    """
    parts = _parts(optimizer)
    states = [loaded] if len(parts) == 1 else [loaded[index] for index in sorted(loaded)]
    for part, state in zip(parts, states, strict=True):
        if not isinstance(part, DistributedOptimizer):
            part.load_state_dict(state)
            _separate_steps(part.optimizer)
            continue
        tensors = state.pop("param_state")
        part.load_state_dict(state)
        # The format holds no step of a parameter, and Megatron would ask for one.
        held = part.optimizer.state
        steps = {parameter: s.pop("step") for parameter, s in held.items() if "step" in s}
        part.load_parameter_state_from_fully_reshardable(tensors)
        for parameter, counter in steps.items():
            held[parameter]["step"] = counter
        _separate_steps(part.optimizer)


def _separate_steps(adam: torch.optim.Optimizer) -> None:
    for state in adam.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()


def _check_optimizers(saved: int, optimizer: ChainedOptimizer, checkpoint: Path) -> None:
    built = len(optimizer.chained_optimizers)
    if saved == 0:
        raise ConfigError(f"{checkpoint} holds weights alone; it cannot resume an optimizer")
    if saved != built:
        raise ConfigError(
            f"{checkpoint} holds {saved} optimizers (dense and expert weights apart with "
            f"parallel.expert > 1, together without), this layout has {built}: resume with "
            "parallel.expert > 1 on both sides or on neither, or start from its weights alone"
        )


def _layout(parallel: ParallelContext, chunks: int) -> dict[str, int]:
    return {
        "world": parallel.world_size,
        "tensor": parallel.tp_size,
        "pipeline": parallel.pp_size,
        "chunks": chunks,
        "context": parallel.cp_size,
        "data": parallel.dp_size,
        "expert": parallel.ep_size,
        "expert_tensor": parallel.etp_size,
    }
