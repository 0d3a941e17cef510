from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.rollout import engine_http, health, restarts
from tests.unit.rollout.scripted_server import ScriptedServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setattr(engine_http, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(health, "DEATH_SECONDS", 0.02)
    monkeypatch.setattr(restarts, "FIRST_WAIT_SECONDS", 0.001)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield ScriptedServer(Path(folder) / "s")
