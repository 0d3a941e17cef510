"""The pickled parts of a distributed checkpoint, looked through before anything unpickles them.

torch reads the description of the tensors (`.metadata`) and values that are no tensors with the
whole power of pickle (those that all ranks share, where TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set):
whoever can write to a run directory could have it run any code. Here a description may make what
describes tensors and nothing else, and a value what `torch.load(weights_only=True)` takes.

No class of torch's is touched while we look: a pickle can change the classes that it may name, and
so have the second reading find what the first one did not.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as described

from megatron_dapo.config import ConfigError

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
"""What Megatron keeps of values that are the same on every rank."""

_NOT_A_DESCRIPTION = (
    *(pickle.UnpicklingError, AttributeError, EOFError, ImportError, ArithmeticError),
    *(AssertionError, LookupError, MemoryError, RuntimeError, TypeError, ValueError),
    *(FileNotFoundError, struct.error),
)
"""What the wrong bytes end in."""


class _StandIn:
    """In the place of what a pickle may make. Its class cannot be changed: pickle finds
    `__setstate__` there, and that takes an object."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes a {type(self).__name__}")


class _Record(_StandIn):
    """Of a dataclass: what is in its fields, told once."""

    fields: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        """Empty, as pickle makes it."""

    def __setstate__(self, state: object) -> None:
        if vars(self) or not isinstance(state, dict) or not state.keys() <= self.fields:
            raise pickle.UnpicklingError(f"it gives a {type(self).__name__} more than its fields")
        vars(self).update(state)


class _Properties(_StandIn):
    """Of a tensor, which are told as a tuple and not looked at."""

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple:
            raise pickle.UnpicklingError(f"it gives a {type(self).__name__} more than its fields")


def _record(of: type) -> type[_Record]:
    names = frozenset(field.name for field in dataclasses.fields(of))
    return cast(type[_Record], type(of.__name__, (_Record,), {"fields": names}))


_RECORDS = {
    of: _record(of)
    for of in (
        described.Metadata,
        described.MetadataIndex,
        described.TensorStorageMetadata,
        described.BytesStorageMetadata,
        described.ChunkStorageMetadata,
        described.StorageMeta,
        filesystem._StorageInfo,
    )
}
_ALLOWED: dict[tuple[str, str], object] = {
    **{(of.__module__, of.__name__): record for of, record in _RECORDS.items()},
    (described.__name__, "TensorProperties"): _Properties,
    (described.__name__, "_MEM_FORMAT_ENCODING"): _StandIn,
    **{("torch", name): value for name, value in vars(torch).items() if type(value) is torch.dtype},
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _StandIn,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _StandIn,
    ("pathlib._local", "PosixPath"): _StandIn,
}


def refuse_code(folder: Path) -> None:
    """Look through a distributed checkpoint that is about to be read. Local; builds no tensor.

    Raises:
        ConfigError: it names something else than descriptions of tensors, or a file elsewhere.
    """
    try:
        with (folder / METADATA_FILE).open("rb") as file:
            description = _Unpickler(file).load()
        for path, start, length in _values(description):
            _refuse_code_of(folder / path, start, length)
        if (folder / COMMON_FILE).is_file():
            _refuse_code_of(folder / COMMON_FILE, 0, -1)
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
        return _ALLOWED[module, name]


def _values(description: object) -> Iterator[tuple[str, int, int]]:
    """Where the values lie that are no tensors: file, first byte, how many.

    Raises:
        UnpicklingError: the places are none of files beside the description.
    """
    if not isinstance(description, _RECORDS[described.Metadata]):
        raise pickle.UnpicklingError(f"it holds a {type(description).__name__}")
    kinds, places = (vars(description)[name] for name in ("state_dict_metadata", "storage_data"))
    if type(kinds) is not dict or type(places) is not dict:
        raise pickle.UnpicklingError("its tensors have no names, or no places")
    for index, place in places.items():
        name, found = vars(index)["fqn"], vars(place)
        path, start, length = (found[part] for part in ("relative_path", "offset", "length"))
        inside = isinstance(path, str) and Path(path).name == path and path != ".."
        if (
            not inside
            or type(start) is not int
            or type(length) is not int
            or min(start, length) < 0
        ):
            raise pickle.UnpicklingError(f"{name} lies in {path!r}, {length!r} bytes at {start!r}")
        if found.get("transform_descriptors"):
            raise pickle.UnpicklingError(f"{name} is transformed, which this package does not do")
        if isinstance(kinds[name], _RECORDS[described.BytesStorageMetadata]):
            yield path, start, length


def _refuse_code_of(path: Path, start: int, length: int) -> None:
    with path.open("rb") as file:
        file.seek(start)
        part: BinaryIO = io.BytesIO(file.read(length))
    with torch.serialization.safe_globals([io.BytesIO]):
        torch.load(part, weights_only=True, map_location="cpu")
