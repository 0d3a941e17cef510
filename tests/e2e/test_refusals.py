"""What cannot be trained is refused in seconds, with the place to mend, and nothing is started."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.runs import Finished, Start, command, make_start

LONGEST_CPU_SECONDS = 8.0
"""Of processor time, which other work on the machine stretches less than the clock's; alone on it
3 to 4, most of them for importing transformers."""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return make_start(tmp_path, "qwen3")


def broken_json(start: Start) -> str:
    edit_row(start, 17, lambda line: line[:-9])
    return f"{start.folder}/train.jsonl: 1 of 40 rows cannot be read: line 17: "


def no_answer(start: Start) -> str:
    edit_row(start, 5, lambda line: json.dumps({"prompt": json.loads(line)["prompt"]}))
    return f"{start.folder}/train.jsonl: 1 of 40 rows cannot be read: line 5: "


def no_model(start: Start) -> str:
    shutil.rmtree(start.model)
    return f"model.path={start.model} does not exist"


def edit_row(start: Start, number: int, edit: Callable[[str], str]) -> None:
    file = start.folder / "train.jsonl"
    lines = file.read_text().splitlines()
    lines[number - 1] = edit(lines[number - 1])
    file.write_text("\n".join(lines) + "\n")


def timed_command(*arguments: object) -> tuple[Finished, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("spoil", [broken_json, no_answer, no_model])
def test_a_run_that_cannot_train_is_refused(start: Start, spoil: Callable[[Start], str]) -> None:
    message = spoil(start)
    done, seconds = timed_command("train", start.file, "parallel.tensor=2")
    assert done.code == 78
    assert message in done.err
    assert len(done.err.splitlines()) == 1, done.err
    assert done.out == ""
    assert not (start.folder / "run").exists()
    assert seconds < LONGEST_CPU_SECONDS
