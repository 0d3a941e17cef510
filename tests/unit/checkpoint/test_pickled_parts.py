"""A distributed checkpoint that would run code is refused, and runs none."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_dapo.checkpoint.pickled_parts import COMMON_FILE, METADATA_FILE, refuse_code
from megatron_dapo.config import ConfigError

TENSORS_FILE = "__0_0.distcp"


class Poison:
    """Makes a file as soon as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def describe(*, extra: object = None, place: str = TENSORS_FILE, length: int = 0) -> Metadata:
    """Of one tensor and one value that is no tensor."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    properties = TensorProperties.create_from_tensor(torch.zeros(2, 3, dtype=torch.bfloat16))
    return Metadata(
        state_dict_metadata={
            "weight": TensorStorageMetadata(properties, torch.Size([2, 3]), [chunk]),
            "extra": BytesStorageMetadata(),
        },
        planner_data=extra,
        storage_data={
            MetadataIndex("weight", torch.Size([0, 0]), 0): _StorageInfo(place, 0, 10),
            MetadataIndex("extra"): _StorageInfo(TENSORS_FILE, 10, length),
        },
        storage_meta=StorageMeta(checkpoint_id="step"),
    )


def write(folder: Path, value: object, **more: object) -> None:
    """A folder with the description, and the value behind ten bytes of a tensor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    part = buffer.getvalue()
    metadata = describe(length=len(part), **more)  # type: ignore[arg-type]
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    (folder / TENSORS_FILE).write_bytes(b"0123456789" + part)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(3), io.BytesIO(b"state of a layer"), {"step": 3, "names": ["a"]}, None],
    ids=["tensor", "bytes", "plain data", "nothing"],
)
def test_tensors_and_plain_values_pass(tmp_path: Path, value: object) -> None:
    write(tmp_path, value)
    refuse_code(tmp_path)


def test_a_poisoned_description_is_refused_and_does_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    write(tmp_path, None, extra=Poison(made))
    with pytest.raises(ConfigError, match=r"might run foreign code: it names posix\.mkdir"):
        refuse_code(tmp_path)
    assert not made.exists()
    pickle.loads((tmp_path / METADATA_FILE).read_bytes())
    assert made.exists(), "the poison works"


def test_a_poisoned_value_is_refused_and_does_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    write(tmp_path, Poison(made))
    with pytest.raises(ConfigError, match="might run foreign code"):
        refuse_code(tmp_path)
    assert not made.exists()


def test_a_name_behind_an_allowed_one_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "made"
    name = b"ctorch.distributed.checkpoint.metadata\nos.mkdir\n"
    attack = b"\x80\x04" + name + b"(X" + len(str(made)).to_bytes(4, "little")
    (tmp_path / METADATA_FILE).write_bytes(attack + str(made).encode() + b"tR.")
    with pytest.raises(ConfigError, match="might run foreign code"):
        refuse_code(tmp_path)
    assert not made.exists()


@pytest.mark.parametrize("place", ["../../elsewhere", "/etc/passwd", "a/b"])
def test_a_tensor_in_a_file_elsewhere_is_refused(tmp_path: Path, place: str) -> None:
    write(tmp_path, None, place=place)
    with pytest.raises(ConfigError, match=f"weight lies in '{place}'"):
        refuse_code(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"state_dict_metadata": {}})])
def test_what_is_no_description_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="no checkpoint that this package wrote"):
        refuse_code(tmp_path)


class Swapped:
    """A value that the first reading takes for a tensor."""

    def __reduce__(self) -> tuple[object, tuple[()], tuple[None, dict[str, object]]]:
        return BytesStorageMetadata, (), (None, {"__class__": TensorStorageMetadata})


def set_on_a_class(changed: type, name: bytes, value: type) -> bytes:
    """Opcodes behind a pickle, instead of its end: they change a class that it may name."""
    first, second = (f"c{of.__module__}\n{of.__name__}\n".encode() for of in (changed, value))
    return first + b"(N}X" + len(name).to_bytes(4, "little") + name + second + b"stb0."


def test_a_description_that_changes_what_its_second_reading_finds_is_refused(
    tmp_path: Path,
) -> None:
    made = tmp_path / "made"
    write(tmp_path, Poison(made))
    metadata = pickle.loads((tmp_path / METADATA_FILE).read_bytes())
    metadata.state_dict_metadata["extra"] = Swapped()
    attack = pickle.dumps(metadata)[:-1]
    attack += set_on_a_class(BytesStorageMetadata, b"__setstate__", StorageMeta)
    (tmp_path / METADATA_FILE).write_bytes(attack)
    with pytest.raises(ConfigError, match="might run foreign code"):
        refuse_code(tmp_path)
    assert "__setstate__" not in vars(BytesStorageMetadata)
    try:
        readings = [pickle.loads(attack).state_dict_metadata["extra"] for _ in range(2)]
    finally:
        del BytesStorageMetadata.__setstate__  # type: ignore[attr-defined]
    assert [type(found) for found in readings] == [TensorStorageMetadata, BytesStorageMetadata]


@pytest.mark.parametrize("changed", [Metadata, MetadataIndex, TensorProperties, torch.Size])
def test_a_class_cannot_be_changed(tmp_path: Path, changed: type) -> None:
    write(tmp_path, None)
    text = pickle.dumps(describe())[:-1] + set_on_a_class(changed, b"name", StorageMeta)
    (tmp_path / METADATA_FILE).write_bytes(text)
    with pytest.raises(ConfigError, match="might run foreign code"):
        refuse_code(tmp_path)
    assert vars(changed).get("name") is None


def test_values_cannot_be_hidden_by_a_dictionary_with_methods_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, Poison(tmp_path / "made"))
    metadata = pickle.loads((tmp_path / METADATA_FILE).read_bytes())
    places = OrderedDict(metadata.storage_data)
    places.items = OrderedDict  # type: ignore[assignment, method-assign]
    metadata.storage_data = places
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    assert dict(pickle.loads(pickle.dumps(metadata)).storage_data.items()) == {}
    with pytest.raises(ConfigError, match="might run foreign code"):
        refuse_code(tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        _StorageInfo("..", 10, 5),
        _StorageInfo(TENSORS_FILE, -1, 5),
        _StorageInfo(TENSORS_FILE, 10, -1),
        _StorageInfo(TENSORS_FILE, 10, 2.5),  # type: ignore[arg-type]
        _StorageInfo(TENSORS_FILE, 10, 5, ["stream.zstd/1"]),
    ],
    ids=str,
)
def test_a_value_that_torch_would_read_in_another_way_is_refused(
    tmp_path: Path, place: _StorageInfo
) -> None:
    write(tmp_path, None)
    metadata = pickle.loads((tmp_path / METADATA_FILE).read_bytes())
    metadata.storage_data[MetadataIndex("extra")] = place
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match=r"extra (lies in|is transformed)"):
        refuse_code(tmp_path)


def test_poison_beside_the_description_is_refused_whatever_the_environment_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    write(tmp_path, None)
    torch.save({"param_groups": [{"lr": 1e-6, "betas": (0.9, 0.99)}]}, tmp_path / COMMON_FILE)
    refuse_code(tmp_path)
    torch.save(Poison(tmp_path / "made"), tmp_path / COMMON_FILE)
    with pytest.raises(ConfigError, match="might run foreign code"):
        refuse_code(tmp_path)
    assert not (tmp_path / "made").exists()
    with pytest.warns(UserWarning, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        torch.load(tmp_path / COMMON_FILE, map_location="cpu")
    assert (tmp_path / "made").exists(), "the poison works"


@pytest.mark.parametrize(
    "content", [b"\x80\x04\x8d" + b"\xff" * 8, b"\x80\x04h\x07.", b"\x80\x04}b.", b"\x80\x04Nb."]
)
def test_a_description_that_no_reader_gets_through_is_refused(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / METADATA_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="no checkpoint that this package wrote"):
        refuse_code(tmp_path)


@pytest.mark.parametrize("part", [b"", b"\x80\x02J\x01", b"\x80\x02h\x07.", b"PK\x03\x04", None])
def test_a_value_that_no_reader_gets_through_is_refused(tmp_path: Path, part: bytes | None) -> None:
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(describe(length=len(part or b""))))
    if part is not None:
        (tmp_path / TENSORS_FILE).write_bytes(b"0123456789" + part)
    with pytest.raises(ConfigError, match="no checkpoint that this package wrote"):
        refuse_code(tmp_path)
