"""A distributed checkpoint that would run code is refused, and runs none."""

from __future__ import annotations

import io
import os
import pickle
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

from megatron_dapo.checkpoint.pickled_parts import METADATA_FILE, refuse_code
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
