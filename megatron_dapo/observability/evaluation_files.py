"""Files of an evaluation: every response, and what was counted. Each is whole or not there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from megatron_dapo.config.whole_files import whole_file
from megatron_dapo.observability.samples import sample_row
from megatron_dapo.types import Group

EVALUATION_FOLDER = "evaluation"
"""In the run directory: step_00000005.json and .jsonl of each evaluation inside the loop."""

Sets = Mapping[str, Sequence[Group]]
"""Graded responses by the name of their set."""


def evaluation_file(run_dir: Path, step: int, suffix: str) -> Path:
    """Where an evaluation inside the loop is written."""
    return run_dir / EVALUATION_FOLDER / f"step_{step:08d}{suffix}"


def write_samples(path: Path, step: int, sets: Sets) -> None:
    """One line a response: the columns of samples.jsonl, with the set and the seed.

    Raises:
        OSError: the file cannot be written.
    """
    with _draft_of(path) as file:
        for row in _rows(step, sets):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_report(path: Path, content: Mapping[str, object]) -> None:
    """A JSON file for programs.

    Raises:
        OSError: the file cannot be written.
    """
    with _draft_of(path) as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")


def _rows(step: int, sets: Sets) -> Iterator[dict[str, object]]:
    for name, groups in sets.items():
        for group in groups:
            for response, reward in zip(group.responses, group.rewards, strict=True):
                row = sample_row(step, group, response, reward)
                yield {"set": name, **row, "seed": response.seed}


@contextmanager
def _draft_of(path: Path) -> Iterator[TextIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as draft, draft.open("w", encoding="utf-8", errors="replace") as file:
        yield file
