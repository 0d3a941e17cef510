"""Headers of weight files, against the safetensors library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from megatron_dapo.config.weight_files import make_header, read_header


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
