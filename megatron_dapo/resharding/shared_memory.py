"""Publish weights to engines on the same machine: one safetensors file in shared memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.resharding.private_directory import SHARED_MEMORY, PrivateDirectory
from megatron_dapo.resharding.transfer import DESTINATION, WeightStream

SAFETENSORS_DTYPE = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


class WeightPayload(TypedDict):
    """What an engine needs to load one published version; JSON-able."""

    path: str
    policy_version: int
    num_tensors: int
    num_bytes: int
    """Of the tensors; the file adds its header."""


class SharedMemoryTransport:
    """Private directory with the newest published weights."""

    def __init__(self, parent: Path = SHARED_MEMORY) -> None:
        """Touch nothing yet: only the rank that publishes makes the directory."""
        self._parent = parent
        self._directory: PrivateDirectory | None = None

    def publish(self, stream: WeightStream, version: int) -> WeightPayload | None:
        """Write the stream as one safetensors file; returns its description on global rank 0.

        Every rank that takes part in the stream calls it; the others return None. Files of
        earlier versions are removed first, so shared memory holds one copy: every engine must
        have acknowledged the earlier version.

        Raises:
            RuntimeError: the stream does not bring the tensors that it announced.
        """
        if dist.is_initialized() and dist.get_rank() != DESTINATION:
            for _ in stream:
                raise RuntimeError(f"rank {dist.get_rank()} got weights meant for {DESTINATION}")
            return None
        directory = self._open()
        for earlier in directory.glob("*.safetensors"):
            earlier.unlink()
        path = directory / f"policy_{version}.safetensors"
        unfinished = path.with_suffix(".tmp")
        write_safetensors(unfinished, stream, {"policy_version": str(version)})
        unfinished.rename(path)
        return WeightPayload(
            path=str(path),
            policy_version=version,
            num_tensors=len(stream.tensors),
            num_bytes=stream.num_bytes,
        )

    def close(self) -> None:
        """Remove the directory and everything in it."""
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def _open(self) -> Path:
        if self._directory is None:
            self._directory = PrivateDirectory(self._parent)
        return self._directory.path


def write_safetensors(path: Path, stream: WeightStream, metadata: dict[str, str]) -> None:
    """Write a stream in the safetensors format, holding no more than one tensor beside the file.

    Raises:
        RuntimeError: a tensor comes that was not announced next, or too few come.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"} | metadata}
    offset = 0
    for name, shape in stream.tensors.items():
        end = offset + math.prod(shape) * stream.dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_DTYPE[stream.dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    announced = iter(stream.tensors.items())
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in stream:
            coming = next(announced, None)
            if coming != (name, tuple(tensor.shape)) or tensor.dtype != stream.dtype:
                raise RuntimeError(
                    f"weight stream brought {name!r} {tuple(tensor.shape)} {tensor.dtype}, "
                    f"announced was {coming} {stream.dtype}"
                )
            file.write(_bytes_of(tensor))
    missing = next(announced, None)
    if missing is not None:
        raise RuntimeError(f"weight stream ended before {missing[0]!r}")


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
