"""Headers of weight files, against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from megatron_dapo.config.machine_checks import weight_problems
from megatron_dapo.config.weight_files import INDEX_FILE, make_header, read_header, read_index
from megatron_dapo.resharding.load import HfFolder
from megatron_dapo.resharding.name_map import HfTensor


@pytest.mark.parametrize("names", [["a"], ["first", "second"], ["x" * 37, "y", "z" * 1000]])
def test_a_file_behind_our_header_is_one_that_safetensors_reads(
    tmp_path: Path, names: list[str]
) -> None:
    values = {name: np.arange(3 + n, dtype=np.float32) + n for n, name in enumerate(names)}
    tensors = [(name, "F32", value.shape, value.nbytes) for name, value in values.items()]
    header = make_header(tensors, {"policy_version": "3"})
    assert len(header) % 8 == 0  # the numbers are aligned in the mapped file
    file = tmp_path / "some.safetensors"
    file.write_bytes(header + b"".join(value.tobytes() for value in values.values()))
    with safe_open(file, framework="np") as opened:
        assert opened.metadata() == {"format": "pt", "policy_version": "3"}
        assert set(opened.keys()) == set(names)
        for name, value in values.items():
            assert np.array_equal(opened.get_tensor(name), value)
    found = read_header(file)
    assert found is not None
    assert {name: tuple(found[name]["shape"]) for name in names} == {
        name: value.shape for name, value in values.items()
    }


def test_a_file_without_tensors_has_a_header_too(tmp_path: Path) -> None:
    file = tmp_path / "empty.safetensors"
    file.write_bytes(make_header([]))
    assert read_header(file) == {"__metadata__": {"format": "pt"}}
    with safe_open(file, framework="np") as opened:
        assert list(opened.keys()) == []


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        7,
        {"a": 5},
        {"a": {}},
        {"a": ENTRY | {"data_offsets": [0]}},
        {"a": ENTRY | {"data_offsets": ["0", "x"]}},
        {"a": ENTRY | {"data_offsets": [8, 0]}},
        {"a": ENTRY | {"data_offsets": 8}},
        {"a": ENTRY | {"shape": "2"}},
        {"a": ENTRY | {"dtype": None}},
        {"a": {"shape": [2], "data_offsets": [0, 8]}},
    ],
    ids=repr,
)
def test_what_is_no_header_is_none(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "some.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert read_header(file) is None
    text = json.dumps({"a": ENTRY}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert read_header(file) == {"a": ENTRY}


@pytest.mark.parametrize(
    "text", ["", "\x00", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 3}}', "[" * 99_999]
)
def test_what_is_no_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{INDEX_FILE} is no index of weights"):
        read_index(tmp_path / INDEX_FILE)
    (problem,) = weight_problems(tmp_path)
    assert f"model.path={tmp_path}: " in problem and "fetch it again" in problem
    with pytest.raises(ValueError, match="is no index of weights"), HfFolder(tmp_path):
        pytest.fail("opened")


@pytest.mark.parametrize("kind", ["folder", "loop"])
def test_what_is_no_file_of_weights_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    (problem,) = weight_problems(tmp_path)
    assert "model.safetensors cannot be read" in problem


def test_a_tensor_that_its_library_refuses_is_named(tmp_path: Path) -> None:
    tensor = HfTensor("a", (2,))
    text = json.dumps({"a": ENTRY | {"dtype": "Q9"}}).encode()
    (tmp_path / "1.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    (tmp_path / "2.safetensors").write_bytes(make_header([]))
    for file, message in (("1", "1.safetensors cannot be read"), ("2", "tensor 'a' of")):
        index = {"weight_map": {"a": f"{file}.safetensors"}}
        (tmp_path / INDEX_FILE).write_text(json.dumps(index))
        with HfFolder(tmp_path) as folder, pytest.raises(ValueError, match=message):
            folder.read(tensor, 0, slice(0, 2))
