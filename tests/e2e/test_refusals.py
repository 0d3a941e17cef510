"""What cannot be trained is refused with the place to mend, before anything large is imported."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.runs import Start, command, make_start

LARGE = ("megatron", "vllm")
"""Packages that only ranks and engines need."""


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


def without(packages: Sequence[str], folder: Path) -> dict[str, str]:
    """Environment of a command that ends where it imports one of them."""
    for name in packages:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} is imported')")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}


@pytest.mark.parametrize("spoil", [broken_json, no_answer, no_model])
def test_a_run_that_cannot_train_is_refused(start: Start, spoil: Callable[[Start], str]) -> None:
    message = spoil(start)
    environment = without(LARGE, start.folder / "in_the_way")
    done = command("train", start.file, "parallel.tensor=2", environment=environment)
    assert done.code == 78, done.err
    assert message in done.err
    assert len(done.err.splitlines()) == 1, done.err
    assert done.out == ""
    assert not (start.folder / "run").exists()
