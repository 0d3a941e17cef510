"""Files of weights in a Hugging Face folder: their names, and what stands before the numbers.

A safetensors file is 8 bytes of length, a header in JSON, and the tensors. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

INDEX_FILE = "model.safetensors.index.json"
"""Which of several files holds which tensor."""
SINGLE_FILE = "model.safetensors"
"""The only file, where there is no index."""
_LENGTH_BYTES = 8
_NOT_THE_FORMAT = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading something else ends in."""


def read_header(file: Path) -> dict[str, dict] | None:
    """The header of a safetensors file: tensor name -> dtype, shape and place.

    None when the file is not as long as its header says, or that is none.
    """
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        size = file.stat().st_size
        if not 2 <= header_bytes <= size - _LENGTH_BYTES:
            return None
        try:
            header: dict[str, dict] = json.loads(opened.read(header_bytes))
            ends = [_end_of(entry) for name, entry in header.items() if name != "__metadata__"]
        except _NOT_THE_FORMAT:
            return None
    return header if _LENGTH_BYTES + header_bytes + max(ends, default=0) == size else None


def _end_of(entry: dict) -> int:
    """Where a tensor ends, of an entry that has all of its parts."""
    start, end = entry["data_offsets"]
    if not (isinstance(entry["dtype"], str) and isinstance(entry["shape"], list)):
        raise TypeError(f"{entry} is no tensor")
    if not 0 <= int(start) <= int(end):
        raise ValueError(f"{entry} ends before it begins")
    return int(end)


def read_index(file: Path) -> dict[str, str]:
    """Tensor name -> name of the file that holds it, of an `INDEX_FILE`.

    Raises:
        ValueError: it holds something else.
    """
    try:
        found: dict[str, str] = json.loads(file.read_text())["weight_map"]
        if not all(isinstance(name, str) for name in found.values()):
            raise TypeError("not every tensor lies in a file")
    except _NOT_THE_FORMAT as error:
        raise ValueError(f"{file} is no index of weights ({error!r}); fetch it again") from error
    return found


def make_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """What stands before the numbers: length and header, filled up to a multiple of 8 bytes.

    Args:
        tensors: (name, dtype as the format spells it, shape, bytes), in the order of the file.
        metadata: of the writer's own.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        span = [offset, offset + num_bytes]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": span}
        offset += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
