"""Read the weights of a checkpoint as Hugging Face tensors, one parameter at a time.

No model is built and no rank is asked: the files of a distributed checkpoint hold every
parameter as one tensor, whatever layout saved it, in pieces that name their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from transformers import PretrainedConfig

from megatron_dapo.resharding.cuts import unfuse
from megatron_dapo.resharding.name_map import Entry, Family, Rule, family_for
from megatron_dapo.resharding.transfer import WeightStream

NOT_WEIGHTS = ("optimizer.",)
"""Keys of the optimizer's state, which lies in the same files."""


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies: in a tensor of the checkpoint that may stack layers and experts."""

    key: str
    leading: tuple[int, ...]
    """Its layer and its expert, as far as the tensor stacks them in front."""
    shape: tuple[int, ...]
    """Of the parameter, whole; the vocabulary without padding."""


def saved_weights(folder: Path, hf_config: PretrainedConfig, *, dtype: torch.dtype) -> WeightStream:
    """All weights of a checkpoint as full Hugging Face tensors, in the order of export.

    One process calls it alone. It holds one parameter at a time, and of the files one piece as
    a rank saved it. Padding rows of embedding and head are left out. No gradient.

    Args:
        folder: of the distributed checkpoint, with its `.metadata`.
        dtype: of the result; what was saved in another one is rounded.

    Raises:
        ValueError: the checkpoint lacks a parameter of the model, holds one that the model does
            not have, or one of another shape; the message names it.
    """
    family = family_for(hf_config)
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    places = _find_all(metadata, family, folder)
    return WeightStream(family.hf_tensors, dtype, _stream(reader, metadata, places, family, dtype))


def _stream(
    reader: FileSystemReader,
    metadata: Metadata,
    places: Mapping[Entry, _Place],
    family: Family,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    for entry, place in places.items():
        whole = _read(reader, _tensors(metadata)[place.key], place).to(dtype)
        # One shard that holds every key/value group and all of gate, then all of up.
        blocks = family.kv_groups if entry.rule.cut.per_kv_group else 1
        parts = unfuse(whole, [tensor.shape[0] for tensor in entry.hf], blocks)
        del whole
        for tensor in entry.hf:
            yield tensor.name, parts.pop(0)


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return {
        key: stored
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and not key.startswith(NOT_WEIGHTS)
    }


def _find_all(metadata: Metadata, family: Family, folder: Path) -> dict[Entry, _Place]:
    """Where each exported parameter lies; every tensor of the checkpoint is one of them."""
    stored = _tensors(metadata)
    places = {
        entry: _find(entry, stored, family, folder)
        for entry in family.entries
        if entry.rule.exported
    }
    unknown = sorted(stored.keys() - {place.key for place in places.values()})
    if unknown:
        raise ValueError(
            f"{folder} holds {unknown[0]!r}, which belongs to no parameter of the model that "
            "model.path describes; an export would lose it. Give the config.json that the run "
            "was trained with"
        )
    return places


def _find(
    entry: Entry, stored: Mapping[str, TensorStorageMetadata], family: Family, folder: Path
) -> _Place:
    shape = (sum(tensor.shape[0] for tensor in entry.hf), *entry.hf[0].shape[1:])
    keys = _spellings(entry.rule)
    for spelling, stacks_layers in keys:
        key = spelling.format(layer=entry.layer)
        if key not in stored:
            continue
        stacks = [(entry.layer, family.num_layers)] if stacks_layers else []
        stacks += [(entry.expert, family.num_experts)] if entry.expert is not None else []
        _check_shape(key, stored[key].size, [count for _, count in stacks], shape, entry, folder)
        return _Place(key, tuple(number for number, _ in stacks if number is not None), shape)
    spelled = " or ".join(repr(key.format(layer=entry.layer)) for key, _ in keys)
    raise ValueError(
        f"{folder} has no {spelled}, which config.json of model.path asks for; give the "
        "config.json that the run was trained with"
    )


def _check_shape(
    key: str,
    size: Sequence[int],
    stacks: Sequence[int],
    shape: Sequence[int],
    entry: Entry,
    folder: Path,
) -> None:
    """The stacks, then the parameter itself, whose rows may go on with padding."""
    wanted, at = [*stacks, *shape], len(stacks)
    held = list(size)
    if entry.rule.cut.padded and len(held) > at:
        held[at] = min(held[at], wanted[at])
    if held != wanted:
        raise ValueError(
            f"{folder} holds {key!r} of shape {tuple(size)}, config.json of model.path asks for "
            f"{tuple(wanted)}; give the config.json that the run was trained with"
        )


def _spellings(rule: Rule) -> list[tuple[str, bool]]:
    """(key in a checkpoint, whether its tensor stacks the layers), for each way to save a rule.

    Experts are one tensor, whichever module computes them.
    """
    keys = []
    for spelling in rule.megatron:
        key = spelling.replace(".local_experts.{expert}.", ".experts.")
        if "{expert}" in key:
            continue  # grouped experts: saved under the key of the single ones
        keys.append((key, False))
        if "{layer}" in key:
            keys.append((key.replace(".{layer}.", "."), True))
    return keys


class _IntoOneTensor(DefaultLoadPlanner):
    """Puts what is read into its place of one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.target
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: the tensor was a view of the target."""


def _read(reader: FileSystemReader, stored: TensorStorageMetadata, place: _Place) -> Tensor:
    """One parameter, whole, on CPU in the dtype it was saved in."""
    ones = (1,) * len(place.leading)
    offsets = torch.Size((*place.leading, *(0,) * len(place.shape)))
    wanted = ChunkStorageMetadata(offsets, torch.Size((*ones, *place.shape)))
    items = create_read_items_for_chunk_list(place.key, stored, [wanted])
    covered = sum(math.prod(item.lengths) for item in items)
    if covered != math.prod(place.shape):
        raise ValueError(
            f"{reader.path}: the pieces of {place.key!r} cover {covered} of "
            f"{math.prod(place.shape)} numbers; the checkpoint is damaged, export another step"
        )
    target = torch.empty(wanted.sizes, dtype=stored.properties.dtype)
    reader.read_data(LoadPlan(items), _IntoOneTensor(target)).wait()
    return target.view(place.shape)
