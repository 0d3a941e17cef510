"""Write safetensors files from a stream of tensors, never holding more than one of them.

Names and shapes are known before the first tensor comes, so files are laid out first: each
gets its header, then its tensors as they arrive.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.checkpoint.folder_check import TensorRecord
from megatron_dapo.config.weight_files import INDEX_FILE, SINGLE_FILE, make_header

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Names in the header."""
HEADER_BYTES = 200
"""Room for one tensor's entry in the header."""


@dataclass
class _Shard:
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    file: str = SINGLE_FILE


def tensor_records(
    tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, TensorRecord]:
    """What the headers will say of each tensor.

    Raises:
        ValueError: a dtype that the format has no name for here.
    """
    if dtype not in DTYPES:
        allowed = ", ".join(str(known) for known in DTYPES)
        raise ValueError(f"tensors of {dtype} cannot be exported; allowed are {allowed}")
    return {
        name: TensorRecord(dtype=DTYPES[dtype], shape=list(shape))
        for name, shape in tensors.items()
    }


def write_shards(
    stream: Iterable[tuple[str, Tensor]],
    folder: Path,
    tensors: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Write the stream as one safetensors file, or as several with an index; all flushed to disk.

    Args:
        stream: (name, tensor) pairs in the order of `tensors`, on any device.
        tensors: name -> shape of all that will come.
        dtype: of every tensor.
        max_shard_bytes: most bytes of a file; a larger tensor gets a file of its own.

    Raises:
        RuntimeError: a tensor comes that was not announced next, or too few or too many come.
    """
    shards = _lay_out(tensors, dtype, max_shard_bytes)
    arriving = iter(stream)
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(_header(shard.tensors, dtype))
            for name, shape in shard.tensors.items():
                file.write(_next_bytes(arriving, name, shape, dtype))
            file.flush()
            os.fsync(file.fileno())
    surplus = next(arriving, None)
    if surplus is not None:
        raise RuntimeError(f"the stream brought {surplus[0]!r}, which the model does not have")
    if len(shards) > 1:
        size = sum(math.prod(shape) for shape in tensors.values()) * dtype.itemsize
        weight_map = {name: shard.file for shard in shards for name in shard.tensors}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _lay_out(
    tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int
) -> list[_Shard]:
    shards = [_Shard()]
    filled = 0
    for name, shape in tensors.items():
        size = math.prod(shape) * dtype.itemsize + HEADER_BYTES
        if shards[-1].tensors and filled + size > max_shard_bytes:
            shards.append(_Shard())
            filled = 0
        shards[-1].tensors[name] = shape
        filled += size
    if len(shards) > 1:
        for number, shard in enumerate(shards, 1):
            shard.file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    return shards


def _header(tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    return make_header(
        (name, record["dtype"], record["shape"], math.prod(record["shape"]) * dtype.itemsize)
        for name, record in tensor_records(tensors, dtype).items()
    )


def _next_bytes(
    arriving: Iterator[tuple[str, Tensor]], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> memoryview:
    arrived = next(arriving, None)
    if arrived is None:
        raise RuntimeError(f"the stream ended before {name!r}; the folder was not written")
    came, tensor = arrived
    if (came, tuple(tensor.shape), tensor.dtype) != (name, tuple(shape), dtype):
        raise RuntimeError(
            f"the stream brought {came!r} {tuple(tensor.shape)} {tensor.dtype} where {name!r} "
            f"{tuple(shape)} {dtype} was announced"
        )
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
