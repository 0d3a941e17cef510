"""make install and its friends, as far as they can be told without installing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

TARGETS = (
    "quickstart",
    "test",
    "test-unit",
    "test-parallel",
    "test-e2e",
    "test-full",
    "test-gpu",
    "lint",
    "install",
    "clean",
)


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make with this repository's Makefile in `folder`."""
    return subprocess.run(
        ["make", "-f", str(REPOSITORY / "Makefile"), *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the two files that the installation depends on."""
    (tmp_path / "requirements").mkdir()
    for name in ("requirements/cpu.txt", "setup.py"):
        (tmp_path / name).write_text((REPOSITORY / name).read_text())
    return tmp_path


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_can_be_planned(checkout: Path, target: str) -> None:
    done = make(checkout, "--dry-run", target)
    assert done.returncode == 0, done.stderr


def test_tests_install_first_and_run_all_three_tiers(checkout: Path) -> None:
    plan = make(checkout, "--dry-run", "test").stdout
    assert plan.index("-m venv") < plan.index("tests/unit")
    assert plan.index("tests/unit") < plan.index("tests/parallel") < plan.index("tests/e2e")
    assert "tests/gpu" not in plan
    assert plan.count("not slow") == 3
    assert "not slow" not in make(checkout, "--dry-run", "test-full").stdout


def test_the_second_installation_does_nothing(checkout: Path) -> None:
    stamp = checkout / ".venv" / ".installed"
    stamp.parent.mkdir()
    stamp.touch()
    assert "venv" not in make(checkout, "--dry-run", "install").stdout
    later = stamp.stat().st_mtime + 60
    os.utime(checkout / "requirements" / "cpu.txt", (later, later))
    assert "-m venv" in make(checkout, "--dry-run", "install").stdout


def test_an_old_python_is_refused_with_the_way_out(checkout: Path) -> None:
    old = checkout / "python3.9"
    old.write_text(
        "#!/bin/sh\n"
        "exec python3 -c \"import sys; sys.version_info = (3, 9); sys.version = '3.9.18'\n"
        '$2"\n'
    )
    old.chmod(0o755)
    done = make(checkout, "install", f"PYTHON={old}")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "3.9.18" in done.stderr
    assert "make install PYTHON=" in done.stderr
    assert not (checkout / ".venv").exists()


def test_one_openmp_thread_is_exported(checkout: Path) -> None:
    probe = checkout / "probe.mk"
    probe.write_text(
        f"include {REPOSITORY / 'Makefile'}\nprobe:\n\t@echo threads=$$OMP_NUM_THREADS\n"
    )
    done = subprocess.run(
        ["make", "--no-print-directory", "-f", str(probe), "probe"],
        cwd=checkout,
        env=os.environ | {"OMP_NUM_THREADS": "9"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "threads=1"


def test_ci_runs_lint_and_tests_and_needs_no_home() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert script.index("make lint") < script.index("make test")
    assert "set -euo pipefail" in script
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("failing", ["lint", "test"])
def test_ci_fails_when_a_step_fails(tmp_path: Path, failing: str) -> None:
    stub = tmp_path / "make"
    stub.write_text(f"#!/bin/bash\n[[ -w $HOME ]] && echo $1 && [[ $1 != {failing} ]]\n")
    stub.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/nonexistent"}
    done = subprocess.run(
        ["bash", str(REPOSITORY / ".ci" / "run")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout.split() == (["lint"] if failing == "lint" else ["lint", "test"])
