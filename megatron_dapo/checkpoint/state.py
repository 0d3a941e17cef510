"""Save and restore everything that an exact resume needs; any layout loads any other's.

Weights and optimizer go through Megatron's distributed checkpoints, which cut every tensor
anew for the layout that loads it. Counters and positions are JSON. Random states belong to
ranks, so they come back only in the layout that saved them.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from pydantic import JsonValue

from megatron_dapo import device
from megatron_dapo.checkpoint.commit import (
    TENSORS,
    FileRecord,
    commit,
    list_files,
    read_manifest,
    record_files,
    remove_old,
    require_complete,
    unfinished_folder,
    verify_files,
)
from megatron_dapo.checkpoint.spawn_guard import require_main_guard
from megatron_dapo.parallel.context import ParallelContext

device.install_cpu_support()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer  # noqa: E402
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402

logger = logging.getLogger(__name__)

CRITIC = "critic"
STATE_FILE = "state.json"
RANDOM = "random"
_OWNER = re.compile(r"(?:__|rank_)(\d+)")
"""Which rank wrote a file, in its name: `__3_0.distcp`, `rank_00003.pt`."""


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

    Every rank calls it, on a file system that all share. Megatron gathers the optimizer's
    shards over the data ranks; the control group waits for all files. Afterwards the folder is
    flushed, has a manifest with digests, and `folder/latest` names it.

    Args:
        chunks: this rank's model chunks, unwrapped.
        optimizer: None saves the weights alone.
        state: counters, positions, schedules; the same on every rank, rank 0's is written.
        critic: of PPO, with its optimizer; into a folder of its own.

    Raises:
        RuntimeError: the main script would be run again by the writer's helper process.
    """
    require_main_guard()
    unfinished = unfinished_folder(folder, step)
    if parallel.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / TENSORS).mkdir(parents=True)
        (unfinished / RANDOM).mkdir()
        if critic is not None:
            (unfinished / CRITIC).mkdir()
        document = {
            "step": step,
            "layout": _layout(parallel, len(chunks)),
            "optimizers": 0 if optimizer is None else len(optimizer.chained_optimizers),
            "state": dict(state),
        }
        (unfinished / STATE_FILE).write_text(json.dumps(document, indent=1))
    dist.barrier(group=parallel.control_group)
    _save_tensors(unfinished / TENSORS, chunks, optimizer)
    if critic is not None:
        _save_tensors(unfinished / CRITIC, critic.chunks, critic.optimizer)
    torch.save(_random_states(), _random_file(unfinished, parallel.rank))
    dist.barrier(group=parallel.control_group)
    records = _record_all(unfinished, parallel)
    if parallel.rank == 0:
        commit(folder, step, records)
        remove_old(folder, keep)
    dist.barrier(group=parallel.control_group)
    return folder / unfinished.stem.removeprefix(".")


def load_checkpoint(
    checkpoint: Path,
    *,
    chunks: Sequence[GPTModel],
    optimizer: ChainedOptimizer | None,
    parallel: ParallelContext,
    critic: Critic | None = None,
    verify_digests: bool = True,
) -> Restored:
    """Fill weights, optimizer and random states from `checkpoint`, whatever layout wrote it.

    Every rank calls it with freshly built parts. Each rank reads the slices that it holds; the
    digests are checked once, the files shared out over the ranks.

    Args:
        optimizer: None takes the weights alone.
        critic: None leaves a saved one where it is.

    Raises:
        RuntimeError: the checkpoint is incomplete or damaged.
        ValueError: its optimizer cannot be cut for this layout, or it has no critic.
    """
    require_complete(checkpoint)
    if verify_digests:
        _verify_all(checkpoint, parallel)
    document = json.loads((checkpoint / STATE_FILE).read_text())
    if optimizer is not None:
        _check_optimizers(document["optimizers"], optimizer, checkpoint)
    if critic is not None and not (checkpoint / CRITIC).is_dir():
        raise ValueError(
            f"{checkpoint} holds no critic: it was saved without advantage.estimator=gae. Resume "
            "with the estimator it was trained with, or start from its weights in a new run_dir"
        )
    _load_tensors(checkpoint / TENSORS, chunks, optimizer)
    if critic is not None:
        _load_tensors(checkpoint / CRITIC, critic.chunks, critic.optimizer)
    same_layout = document["layout"] == _layout(parallel, len(chunks))
    if same_layout:
        _restore_random_states(_random_file(checkpoint, parallel.rank))
    elif parallel.rank == 0 and optimizer is not None:
        logger.warning(
            "%s was saved by layout %s: random states start anew", checkpoint, document["layout"]
        )
    dist.barrier(group=parallel.control_group)
    return Restored(document["step"], document["state"], same_layout)


def holds_optimizer(checkpoint: Path) -> bool:
    """False for weights alone: what `megatron-dapo convert` writes."""
    return json.loads((checkpoint / STATE_FILE).read_text())["optimizers"] > 0


def _metadata() -> dict[str, object]:
    """Format of the optimizer's tensors. A new dict each call: Megatron keeps groups in it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def _save_tensors(
    folder: Path, chunks: Sequence[GPTModel], optimizer: ChainedOptimizer | None
) -> None:
    dist_checkpointing.save(
        _sharded_state(chunks, optimizer, loading=False), str(folder), content_metadata=_metadata()
    )


def _load_tensors(
    folder: Path, chunks: Sequence[GPTModel], optimizer: ChainedOptimizer | None
) -> None:
    loaded = dist_checkpointing.load(_sharded_state(chunks, optimizer, loading=True), str(folder))
    for key, chunk in zip(_chunk_keys(chunks), chunks, strict=True):
        chunk.load_state_dict(loaded[key])
    if optimizer is not None:
        _load_optimizer(optimizer, loaded["optimizer"])


def _chunk_keys(chunks: Sequence[GPTModel]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _sharded_state(
    chunks: Sequence[GPTModel], optimizer: ChainedOptimizer | None, *, loading: bool
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
        raise ValueError(f"{checkpoint} holds weights alone; it cannot resume an optimizer")
    if saved != built:
        raise ValueError(
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


def _random_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / RANDOM / f"rank_{rank:05d}.pt"


def _random_states() -> dict[str, object]:
    states = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(path: Path) -> None:
    states = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _my_share(names: Iterable[str], parallel: ParallelContext) -> list[str]:
    """Files that this rank flushes and digests: its own, and on rank 0 those of nobody."""
    owners = {name: _OWNER.match(name.rpartition("/")[2]) for name in names}
    return [
        name
        for name, owner in owners.items()
        if (int(owner[1]) % parallel.world_size if owner else 0) == parallel.rank
    ]


def _record_all(unfinished: Path, parallel: ParallelContext) -> dict[str, FileRecord]:
    """Sizes and digests of all files, on every rank; each rank reads the files that it wrote."""
    names: list[list[str]] = [list_files(unfinished) if parallel.rank == 0 else []]
    dist.broadcast_object_list(names, src=0, group=parallel.control_group)
    mine = record_files(unfinished, _my_share(names[0], parallel))
    gathered: list[dict[str, FileRecord]] = [{}] * parallel.world_size
    dist.all_gather_object(gathered, mine, group=parallel.control_group)
    return {name: record for records in gathered for name, record in records.items()}


def _verify_all(checkpoint: Path, parallel: ParallelContext) -> None:
    """Check digests; when one rank finds a damaged file, every rank raises."""
    fault = ""
    try:
        verify_files(checkpoint, _my_share(read_manifest(checkpoint), parallel))
    except RuntimeError as error:
        fault = str(error)
    faults: list[str] = [""] * parallel.world_size
    dist.all_gather_object(faults, fault, group=parallel.control_group)
    first = next((text for text in faults if text), None)
    if first is not None:
        raise RuntimeError(first)
