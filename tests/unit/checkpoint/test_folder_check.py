"""What is found in an exported folder: exactly the tensors of the model, or a fault."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.checkpoint.folder_check import (
    check_export,
    check_in_fresh_process,
    folder_faults,
)
from megatron_dapo.checkpoint.safetensors_shards import tensor_records, write_shards
from megatron_dapo.config.weight_files import INDEX_FILE
from tests.unit.handed import Case, handed_cases

TENSORS = {"a": (3, 4), "b": (5,), "c": (2, 2)}
EXPECTED = tensor_records(TENSORS, torch.bfloat16)
FIRST = "model-00001-of-00003.safetensors"


@pytest.mark.parametrize("case", handed_cases("f", "check_export"))
def test_export_check_of_handed_cases(case: Case) -> None:
    given = case["input"]
    check = check_export(given["index"]["weight_map"], given["files"], given.get("expected", ()))
    assert check.ok == case["expect"]["ok"]
    assert list(check.names) == case["expect"]["names"]


def test_tensors_missing_from_a_file_or_from_the_index_are_named() -> None:
    check = check_export({"a": "1", "b": "1"}, {"1": ["a"]}, expected=["a", "b", "c"])
    assert check.names == ("b", "c")
    assert check_export({"a": "1"}, {"1": ["a"]}, expected=["a"]).ok


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files with an index."""
    stream = [(name, torch.ones(shape, dtype=torch.bfloat16)) for name, shape in TENSORS.items()]
    write_shards(stream, tmp_path, TENSORS, torch.bfloat16, max_shard_bytes=1)
    return tmp_path


def lose_a_file(folder: Path) -> str:
    (folder / FIRST).unlink()
    return f"'{FIRST}' is missing"


def cut_a_file(folder: Path) -> str:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1])
    return f"{FIRST} is not as long as its header says"


def reshape(folder: Path) -> str:
    save_file({"a": torch.ones(4, 3, dtype=torch.bfloat16)}, folder / FIRST)
    return r"'a' in .* is .*\[4, 3\].* must be .*\[3, 4\]"


def other_dtype(folder: Path) -> str:
    save_file({"a": torch.ones(3, 4)}, folder / FIRST)
    return "'a' in .* is .*'F32'.* must be .*'BF16'"


def one_too_many(folder: Path) -> str:
    save_file(load_file(folder / FIRST) | {"d": torch.ones(1)}, folder / FIRST)
    return "'d' in .* is no tensor of the model"


def forgotten_by_the_index(folder: Path) -> str:
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["weight_map"]["b"]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return "'b' is missing"


def held_twice(folder: Path) -> str:
    tensors = load_file(folder / FIRST) | {"b": torch.ones(5, dtype=torch.bfloat16)}
    save_file(tensors, folder / FIRST)
    return f"'b' in {FIRST} is not where the index looks for it"


FAULTS = [
    lose_a_file,
    cut_a_file,
    reshape,
    other_dtype,
    one_too_many,
    forgotten_by_the_index,
    held_twice,
]


@pytest.mark.parametrize("spoil", FAULTS)
def test_a_fault_of_the_folder_is_found(folder: Path, spoil: Callable[[Path], str]) -> None:
    assert list(folder_faults(folder, EXPECTED)) == []
    message = spoil(folder)
    found = "\n".join(folder_faults(folder, EXPECTED))
    assert re.search(message, found), found


def test_another_process_says_the_same(folder: Path) -> None:
    check_in_fresh_process(folder, EXPECTED)
    lose_a_file(folder)
    with pytest.raises(RuntimeError, match=f"'{FIRST}' is missing"):
        check_in_fresh_process(folder, EXPECTED)
