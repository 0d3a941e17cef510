"""What a checkpoint says of itself: its step and layout, and named states as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from megatron_dapo.checkpoint.commit import other_format, read_manifest

FORMAT = 2
"""Rises when a file of a checkpoint is renamed or changes its meaning."""
HEADER_FILE = "checkpoint.json"
STATES = "state"
"""Folder of the named states, a file each."""


@dataclass(frozen=True)
class Score:
    """What `checkpoint.keep_best` compares."""

    metric: str
    value: float


@dataclass(frozen=True)
class Header:
    """The file that tells how to read the others."""

    step: int
    layout: dict[str, int]
    """Sizes of the ranks that wrote it."""
    optimizers: int
    """0: weights alone."""
    score: Score | None = None

    def text(self) -> str:
        """As it is written."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def read_header(checkpoint: Path) -> Header:
    """The header of a complete checkpoint.

    Raises:
        ConfigError: another version of this package wrote it in another format.
    """
    path = checkpoint / HEADER_FILE
    document: dict[str, Any] = {"format": 1}
    if path.is_file():
        document = json.loads(path.read_text())
    found = document.pop("format")
    if found != FORMAT:
        raise other_format(checkpoint, HEADER_FILE, found, FORMAT)
    score = document.pop("score")
    return Header(**document, score=None if score is None else Score(**score))


def state_files(state: Mapping[str, JsonValue]) -> dict[str, bytes]:
    """File name in the checkpoint -> content, of each named state."""
    return {f"{STATES}/{name}.json": json.dumps(value).encode() for name, value in state.items()}


def read_state(checkpoint: Path, name: str) -> JsonValue:
    """One named state; None where the checkpoint has none of that name."""
    path = checkpoint / STATES / f"{name}.json"
    state: JsonValue = json.loads(path.read_text()) if path.is_file() else None
    return state


def read_states(checkpoint: Path) -> dict[str, JsonValue]:
    """Every named state of a checkpoint; other files in the folder are nobody's."""
    names = (name for name in read_manifest(checkpoint) if name.startswith(f"{STATES}/"))
    paths = [checkpoint / name for name in sorted(names)]
    return {path.stem: json.loads(path.read_text()) for path in paths}
