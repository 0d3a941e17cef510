"""What this machine lacks is told apart from what is wrong everywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_dapo.config import ConfigError, check_run, load_config, machine_checks
from megatron_dapo.config.machine_checks import (
    cuda_is_visible,
    decide_device,
    meant_for_another_machine,
    weight_problems,
)
from megatron_dapo.config.versions import is_installed
from tests.unit.config.runs import DENSE, NO_TENSORS, make_config, write_run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that shows a CUDA device."""
    monkeypatch.setattr(machine_checks, "NVIDIA_DEVICE", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_sound_run_returns_the_models_configuration(tmp_path: Path) -> None:
    assert check_run(load_config(write_run(tmp_path), ["device=cpu"])) == DENSE


@pytest.mark.usefixtures("gpu")
def test_auto_is_decided_by_what_the_machine_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = make_config().model_copy(update={"device": "auto"})
    assert decide_device(auto).device == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not cuda_is_visible()
    assert decide_device(auto).device == "cpu"


@pytest.mark.usefixtures("no_gpu")
def test_only_an_explicit_gpu_configuration_is_meant_for_another_machine() -> None:
    def device(kind: str) -> bool:
        return meant_for_another_machine(make_config().model_copy(update={"device": kind}))

    assert [device(kind) for kind in ("auto", "cpu", "cuda")] == [False, False, True]


@pytest.mark.usefixtures("gpu")
def test_fp8_without_transformer_engine_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setattr(machine_checks.importlib.util, "find_spec", lambda name: None)
    config = load_config(write_run(tmp_path), ["precision.fp8=blockwise"])
    with pytest.raises(ConfigError, match=r"full precision without a word.*megatron_dapo\[gpu\]"):
        check_run(config)


def test_our_own_engines_need_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "package_version", lambda name: None)
    file = write_run(tmp_path)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        check_run(load_config(file, ["device=cpu"]))
    check_run(load_config(file, ["device=cpu", "rollout.endpoints=[unix:/tmp/engine.sock]"]))


def test_an_index_names_every_weight_file(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "1.safetensors").write_bytes(NO_TENSORS)
    assert "1 of 2 weight files" in "".join(weight_problems(tmp_path))
    (tmp_path / "2.safetensors").write_bytes(NO_TENSORS)
    assert list(weight_problems(tmp_path)) == []


def test_a_weight_file_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.arange(100, dtype=np.float32)}, file)
    assert list(weight_problems(tmp_path)) == []
    whole = file.read_bytes()
    for cut in (whole[:-1], whole[:50], whole[:8], b"", whole + b"x", b"\xff" * 100):
        file.write_bytes(cut)
        (problem,) = weight_problems(tmp_path)
        assert f"model.safetensors has {len(cut)} bytes" in problem
        assert "Fetch it again" in problem


def test_a_model_path_that_names_a_file_says_so(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    with pytest.raises(ConfigError, match=r"model\.safetensors is a file; must be a Hugging Face"):
        check_run(load_config(file, ["device=cpu", f"model.path={weights}"]))


def test_a_folder_that_is_called_like_a_package_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "not_a_package").mkdir()
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed("a_package")
    assert not is_installed("not_a_package")
    assert not is_installed("nothing_at_all")
