"""What users import, and how little it costs."""

from __future__ import annotations

import subprocess
import sys

import megatron_dapo
from megatron_dapo.config import load_config


def test_the_package_offers_load_config() -> None:
    assert megatron_dapo.load_config is load_config


def test_importing_the_package_loads_no_heavy_package() -> None:
    script = (
        "import sys, megatron_dapo\n"
        "print({'torch', 'transformers', 'megatron', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
