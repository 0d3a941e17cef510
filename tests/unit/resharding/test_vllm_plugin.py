"""Engine side of the weight transfer, as far as it needs no engine."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_dapo.resharding import vllm_plugin
from megatron_dapo.resharding.vllm_files import (
    check_path,
    in_layer_order,
    read_tensors,
    tied_parameters,
)
from megatron_dapo.resharding.vllm_plugin import PolicyEngine, register

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    path = tmp_path / "weights" / "policy_1.safetensors"
    path.parent.mkdir()
    save_file(TENSORS, path)
    return path


def test_vllm_finds_the_plugin() -> None:
    (entry,) = (
        e for e in entry_points(group="vllm.general_plugins") if e.name == vllm_plugin.BACKEND
    )
    assert entry.load() is register


def test_registering_twice_is_harmless() -> None:
    register()
    register()
    engine = WeightTransferEngineFactory._registry[vllm_plugin.BACKEND]()
    assert engine is PolicyEngine


def test_the_package_does_not_import_vllm() -> None:
    code = (
        "import sys, importlib\n"
        "for name in ('types', 'config.schema', 'rollout.vllm_engine', 'rollout.vllm_server',"
        " 'rollout.sampler', 'resharding'):\n"
        "    importlib.import_module('megatron_dapo.' + name)\n"
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_published_file_is_accepted(published: Path) -> None:
    assert check_path(str(published), published.parent) == published


@pytest.mark.parametrize("path", ["../other.safetensors", "link.safetensors", "gone.safetensors"])
def test_files_elsewhere_are_refused(published: Path, path: str) -> None:
    outside = published.parent.parent / "other.safetensors"
    outside.write_bytes(published.read_bytes())
    (published.parent / "link.safetensors").symlink_to(outside)
    with pytest.raises(ValueError, match="are not a file of"):
        check_path(str(published.parent / path), published.parent)


def test_tensors_come_back_as_published(published: Path) -> None:
    tensors = read_tensors(published, num_tensors=2, num_bytes=32)
    assert set(tensors) == {"a", "b"}
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor)


@pytest.mark.parametrize(("count", "size"), [(3, 32), (2, 31), (0, 0)])
def test_another_number_of_tensors_or_bytes_is_refused(
    published: Path, count: int, size: int
) -> None:
    with pytest.raises(ValueError, match="holds 2 tensors with 32 bytes"):
        read_tensors(published, num_tensors=count, num_bytes=size)


def test_weights_are_loaded_layer_by_layer() -> None:
    names = ["norm", "layers.1.b", "layers.0.a", "layers.1.a", "layers.0.b"]
    ordered = [name for name, _ in in_layer_order(dict.fromkeys(names, torch.zeros(1)))]
    layers = [name.split(".")[1] for name in ordered if name.startswith("layers")]
    assert sorted(ordered) == sorted(names)
    assert layers == ["0", "0", "1", "1"]


def test_tied_parameters_are_those_of_a_later_owner() -> None:
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(4, 3)
    model.head = torch.nn.Linear(3, 4)
    assert tied_parameters(model) == {}
    model.head.weight = model.embed.weight
    assert tied_parameters(model) == {"head.weight": model.head}
