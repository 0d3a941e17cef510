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


def read_header(file: Path) -> dict[str, dict] | None:
    """The header of a safetensors file: tensor name -> dtype, shape and place.

    None when the file is not as long as its header says.
    """
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        size = file.stat().st_size
        if not 2 <= header_bytes <= size - _LENGTH_BYTES:
            return None
        try:
            header: dict[str, dict] = json.loads(opened.read(header_bytes))
        except ValueError:
            return None
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return header if _LENGTH_BYTES + header_bytes + max(ends, default=0) == size else None


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
