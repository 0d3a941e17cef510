"""Megatron's sharded state as files, in two parts: planned by all ranks, written by each alone.

What is written is the format of torch.distributed.checkpoint with Megatron's metadata: any layout
loads it through `dist_checkpointing.load`. Megatron's own writer forks processes, starts another
that imports the main script, and lets ranks wait for one that failed; this one is a plain function
that a thread can run, and a failure of which is agreed on by its caller.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megatron_dapo import device
from megatron_dapo.checkpoint.durable_files import DurableFile, FileRecord, write_durably
from megatron_dapo.checkpoint.pickled_parts import METADATA_FILE

device.install_cpu_support()

from megatron.core.dist_checkpointing.core import (  # noqa: E402
    CONFIG_FNAME,
    CheckpointingConfig,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess  # noqa: E402
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

Places = dict[MetadataIndex, _StorageInfo]
"""Where each piece of a tensor lies."""


@dataclass(frozen=True)
class StagedTensors:
    """This rank's part of one distributed checkpoint, and on global rank 0 what describes all."""

    items: list[tuple[WriteItem, Tensor | io.BytesIO]]
    metadata: Metadata | None
    common: bytes
    """State that is no tensor; empty elsewhere."""

    @property
    def bytes(self) -> int:
        """That this rank will write, but for headers."""
        return len(self.common) + sum(
            data.nbytes if isinstance(data, Tensor) else data.getbuffer().nbytes
            for _, data in self.items
        )


def stage_tensors(state: dict[str, object], *, group: ProcessGroup, copy: bool) -> StagedTensors:
    """Decide who writes what. Every rank calls it; communicates plans, over `group`.

    Args:
        state: Megatron's sharded state dict; used up.
        copy: take the tensors to memory of their own, so that training may go on while they are
            written. Off, they are read when they are written.
    """
    sharded, common = save_preprocess(state)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    first = dist.get_rank(group) == 0
    planner.set_up_planner(mcore_to_pyt_state_dict(by_key, False), is_coordinator=first)
    plan = planner.create_local_plan()
    plans: list[SavePlan] | None = [plan] * dist.get_world_size(group) if first else None
    dist.gather_object(plan, plans, group_dst=0, group=group)
    metadata = planner.create_global_plan(plans)[1] if plans is not None else None
    plan = planner.finish_plan(planner.create_decentralized_global_plan(plan))
    items = [(item, _taken(planner.resolve_data(item), copy)) for item in plan.items]
    return StagedTensors(items, metadata, _saved(common) if first else b"")


def write_tensors(staged: StagedTensors, folder: Path, rank: int) -> tuple[FileRecord, Places]:
    """Write this rank's pieces into one file of `folder`. Local.

    Raises:
        OSError: the file cannot be written.
    """
    name = tensor_file(rank)
    places: Places = {}
    with DurableFile(folder / name) as file:
        for item, data in staged.items:
            start = file.tell()
            if isinstance(data, Tensor):
                torch.save(_compact(data), cast(BinaryIO, file))
            else:
                file.write(data.getbuffer())
            places[item.index] = _StorageInfo(name, start, file.tell() - start)
        return file.finish(), places


def write_description(
    staged: StagedTensors, folder: Path, places: Sequence[Mapping[MetadataIndex, _StorageInfo]]
) -> dict[str, FileRecord]:
    """The files beside the tensors, by name. Global rank 0 calls it with the places of all ranks.

    Raises:
        OSError: a file cannot be written.
    """
    metadata = staged.metadata
    assert metadata is not None, "only global rank 0 describes a checkpoint"
    metadata.storage_data = {index: place for part in places for index, place in part.items()}
    metadata.storage_meta = StorageMeta(checkpoint_id=folder.name)
    config = CheckpointingConfig("torch_dist", 1)
    files = {
        METADATA_FILE: pickle.dumps(metadata),
        COMMON_STATE_FNAME: staged.common,
        CONFIG_FNAME: json.dumps(asdict(config)).encode(),
    }
    return {name: write_durably(folder / name, content) for name, content in files.items()}


def tensor_file(rank: int) -> str:
    """Name of the file with the pieces of global rank `rank`."""
    return f"__{rank}_0.distcp"


def _taken(data: Tensor | io.BytesIO, copy: bool) -> Tensor | io.BytesIO:
    if isinstance(data, Tensor):
        data = data.detach()
        return data.to("cpu", copy=True) if copy else data
    return data


def _compact(tensor: Tensor) -> Tensor:
    """On CPU; torch.save would write the whole storage that a view is part of."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _saved(common: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return buffer.getvalue()
