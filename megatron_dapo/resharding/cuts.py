"""How one Megatron parameter is made of Hugging Face tensors, and divided over ranks.

Every layout that the name tables need is one of two ideas: a dimension of the Hugging Face
tensor is divided evenly over the ranks, and the pieces that a rank holds are stacked block
by block. Pure functions on sizes and tensors; no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """The rule that turns Hugging Face tensors into the parameter of one rank."""

    dim: int | None
    """Dimension divided over the ranks; None: every rank holds the whole tensor."""
    per_kv_group: bool = False
    """Stacked once for each key/value group of the rank; else once."""
    padded: bool = False
    """Rows are filled up to a multiple of the ranks on import and cut off on export."""


REPLICATED = Cut(dim=None)
ROW = Cut(dim=1)
QKV = Cut(dim=0, per_kv_group=True)
"""For each key/value group of the rank: its query heads, its key head, its value head."""
GATE_UP = Cut(dim=0)
"""The rank's part of gate, then the rank's part of up."""
VOCAB = Cut(dim=0, padded=True)


def shard_bounds(size: int, shards: int, index: int, padded_size: int | None = None) -> slice:
    """The part of a dimension that shard `index` of `shards` holds; empty for pure padding.

    Args:
        padded_size: the dimension with padding at its end, where that is what gets divided.

    Raises:
        ValueError: the dimension does not divide evenly.
    """
    whole = size if padded_size is None else padded_size
    if whole % shards:
        raise ValueError(f"a dimension of {whole} cannot be cut evenly over {shards} ranks")
    length = whole // shards
    return slice(min(index * length, size), min((index + 1) * length, size))


def fuse(parts: Sequence[Tensor], blocks: int) -> Tensor:
    """Stack the pieces of one rank along dimension 0, block by block; [sum of rows, ...].

    With one block this is plain concatenation; with a block for each key/value group it is
    Megatron's interleaved [q.. k v, q.. k v, ...]. One piece comes back as it is.
    """
    if len(parts) == 1:
        return parts[0]
    tail = parts[0].shape[1:]
    return torch.cat([part.reshape(blocks, -1, *tail) for part in parts], dim=1).reshape(-1, *tail)


def unfuse(local: Tensor, rows: Sequence[int], blocks: int) -> list[Tensor]:
    """Undo `fuse`: pieces of the given numbers of rows."""
    if len(rows) == 1:
        return [local]
    tail = local.shape[1:]
    stacked = local.reshape(blocks, -1, *tail)
    pieces = stacked.split([count // blocks for count in rows], dim=1)
    return [piece.reshape(-1, *tail) for piece in pieces]
