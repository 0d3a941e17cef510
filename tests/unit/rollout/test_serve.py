"""An engine on a machine of its own restarts its server as often as the configuration says."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dapo.rollout import restarts, vllm_server
from megatron_dapo.rollout import serve as serve_module
from megatron_dapo.rollout.server_options import Address
from megatron_dapo.rollout.vllm_server import EngineStartError
from tests.unit.config.runs import write_run
from tests.unit.rollout.test_vllm_server import options

HEARD = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of an engine whose server ends at once; signals are given back."""
    monkeypatch.setattr(
        vllm_server, "server_command", lambda options, socket: ["sh", "-c", "echo lost; exit 1"]
    )
    monkeypatch.setattr(restarts, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(serve_module, "POLL_SECONDS", 0.01)
    handlers = [signal.getsignal(number) for number in HEARD]
    token_file = tmp_path / "token"
    token_file.write_text("t")
    yield token_file
    for number, handler in zip(HEARD, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("most", [0, 2])
def test_the_servers_of_a_machine_are_restarted_as_often_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_file: Path, most: int
) -> None:
    engine = replace(options(tmp_path), address=Address("127.0.0.1", 9, token_file))
    monkeypatch.setattr(serve_module, "engine_options", lambda *_: engine)
    arguments = ["--config", str(write_run(tmp_path)), "--hosts", "a", "--first-port", "9"]
    with pytest.raises(EngineStartError, match=rf"ended {most + 1} times(.|\n)*lost"):
        serve_module.main([*arguments, f"rollout.max_restarts={most}"])
    assert engine.log_file.read_text().splitlines() == ["lost"] * (most + 1)


def test_an_engine_ends_well_once_its_token_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    monkeypatch.setattr(vllm_server, "server_command", lambda options, socket: ["sleep", "600"])
    engine = replace(options(tmp_path), address=Address("127.0.0.1", 9, token_file))
    token_file.unlink()
    started = time.monotonic()
    assert serve_module.serve(engine, 0) == 0
    assert time.monotonic() - started < 60


def test_a_server_that_was_up_for_long_has_its_restarts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    monkeypatch.setattr(serve_module, "REFILL_SECONDS", 0.0)
    engine = replace(options(tmp_path), address=Address("127.0.0.1", 9, token_file))
    ended = tmp_path / "ended"
    four_end = f"echo x >>{ended}; if [ $(wc -l <{ended}) -lt 5 ]; then exit 1; fi"
    script = f"{four_end}; rm {token_file}; exec sleep 600"
    monkeypatch.setattr(vllm_server, "server_command", lambda *_: ["sh", "-c", script])
    assert serve_module.serve(engine, 1) == 0
    assert len(ended.read_text().splitlines()) == 5
