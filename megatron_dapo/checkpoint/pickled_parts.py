"""The two pickled parts of a distributed checkpoint, looked through before anything unpickles them.

torch reads the description of the tensors (`.metadata`) and values that are no tensors with the
whole power of pickle: whoever can write to a run directory could have it run any code. Here a
description may name what describes tensors and nothing else, and a value what
`torch.load(weights_only=True)` takes.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron_dapo.config import ConfigError

METADATA_FILE = ".metadata"
_DESCRIPTIONS = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = frozenset(
    [
        *(("torch.distributed.checkpoint.metadata", name) for name in _DESCRIPTIONS),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
    ]
)

_NOT_A_DESCRIPTION = (
    *(pickle.UnpicklingError, AttributeError, EOFError, ImportError),
    *(IndexError, KeyError, RuntimeError, TypeError, ValueError),
)
"""What the wrong bytes end in."""


def refuse_code(folder: Path) -> None:
    """Look through a distributed checkpoint that is about to be read. Local; builds no tensor.

    Raises:
        ConfigError: it names something else than descriptions of tensors, or a file elsewhere.
    """
    try:
        with (folder / METADATA_FILE).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        for index, place in metadata.storage_data.items():
            if Path(place.relative_path).name != place.relative_path:
                raise pickle.UnpicklingError(f"{index.fqn} lies in {place.relative_path!r}")
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                _refuse_code_of(folder / place.relative_path, place.offset, place.length)
    except _NOT_A_DESCRIPTION as error:
        raise ConfigError(
            f"{folder} is no checkpoint that this package wrote, and reading it might run foreign "
            f"code: {error}. Nothing of it was read; take another one"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Builds nothing but `_ALLOWED`."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _refuse_code_of(path: Path, offset: int, length: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        part: BinaryIO = io.BytesIO(file.read(length))
    with torch.serialization.safe_globals([io.BytesIO]):
        torch.load(part, weights_only=True, map_location="cpu")
