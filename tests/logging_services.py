"""What W&B and TensorBoard have of a run, read from their own files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK = 32768


def tensorboard_points(folder: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(name)]


def recorded(run_dir: Path) -> list[dict[str, object]]:
    """Rows of the run in W&B's own files, those of earlier starts first."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: list[dict[str, object]] = []
    for file in sorted(run_dir.glob("wandb/*run-*/*.wandb")):
        for record in map(Record.FromString, log_records(file.read_bytes())):
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): item for item in record.history.item
                }
                rows.append({name: json.loads(item.value_json) for name, item in items.items()})
    return rows


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log behind a header of 7 bytes; a torn one at its end is left out."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        part = data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind == 0 or len(part) < size:
            return
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):
            yield record
