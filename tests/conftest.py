"""Shared fixtures: one thread a process, and where the handed cases and data lie."""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("a machine of any speed", deadline=None)
hypothesis.settings.load_profile("a machine of any speed")
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    # A shell in the background, or nohup, has all that it starts ignore these; tests send them.
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the folder that they live in; GPU tests skip without a device."""
    for item in items:
        tier = Path(item.fspath).relative_to(REPOSITORY / "tests").parts[0]
        if tier in ("parallel", "e2e", "gpu"):
            item.add_marker(getattr(pytest.mark, tier))
        if tier == "gpu" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with real prompts and the Qwen2.5 tokenizer; absent on most machines."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("the shared data folder is not on this machine")
    return folder
