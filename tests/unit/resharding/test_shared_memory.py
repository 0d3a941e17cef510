"""The file that engines read, and what is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.resharding.private_directory import PREFIX, remove_abandoned
from megatron_dapo.resharding.shared_memory import SharedMemoryTransport, write_safetensors
from megatron_dapo.resharding.transfer import WeightStream


def stream_of(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> WeightStream:
    return WeightStream({n: tuple(t.shape) for n, t in tensors.items()}, dtype, tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_reads_what_was_streamed(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.randn(3, 5).to(dtype),
        "b": torch.randn(4, 6).t().to(dtype),  # not contiguous
        "c": torch.randn(7).to(dtype),
    }
    write_safetensors(tmp_path / "w.safetensors", stream_of(tensors, dtype), {})
    loaded = load_file(tmp_path / "w.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_stream_that_breaks_its_announcement_is_refused(tmp_path: Path) -> None:
    announced = {"a": (2,), "b": (2,)}
    path = tmp_path / "w.safetensors"
    for brought, message in (
        ([("b", torch.zeros(2))], "brought 'b'.*announced was .*'a'"),
        ([("a", torch.zeros(3))], r"brought 'a' \(3,\)"),
        ([("a", torch.zeros(2, dtype=torch.float64))], "float64"),
        ([("a", torch.zeros(2))], "ended before 'b'"),
    ):
        with pytest.raises(RuntimeError, match=message):
            write_safetensors(path, WeightStream(announced, torch.float32, brought), {})


def test_a_failed_publish_leaves_no_readable_version(tmp_path: Path) -> None:
    transport = SharedMemoryTransport(tmp_path)
    with pytest.raises(RuntimeError, match="ended before"):
        transport.publish(WeightStream({"a": (2,)}, torch.float32, []), 1)
    assert not list(tmp_path.glob("*/*.safetensors"))
    transport.close()
    assert not list(tmp_path.iterdir())


def test_only_directories_of_dead_runs_are_removed(tmp_path: Path) -> None:
    living = SharedMemoryTransport(tmp_path)
    payload = living.publish(stream_of({"a": torch.ones(2)}, torch.float32), 1)
    assert payload is not None
    crash = (
        "import os, sys; from pathlib import Path; import torch;"
        "from megatron_dapo.resharding.shared_memory import SharedMemoryTransport;"
        "from megatron_dapo.resharding.transfer import WeightStream;"
        "t = SharedMemoryTransport(Path(sys.argv[1]));"
        "t.publish(WeightStream({'a': (1,)}, torch.float32, [('a', torch.ones(1))]), 1);"
        "os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", crash, str(tmp_path)], check=False, timeout=120)
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2
    remove_abandoned(tmp_path)
    assert [str(path) for path in tmp_path.glob("*/*.safetensors")] == [payload["path"]]
    living.close()
    living.close()
    assert not list(tmp_path.iterdir())
