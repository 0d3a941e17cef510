"""An engine on a machine of its own restarts its server as often as the configuration says."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from megatron_dapo.config import RunConfig, load_config
from megatron_dapo.rollout import restarts, vllm_server
from megatron_dapo.rollout import serve as serve_module
from megatron_dapo.rollout.health import CORE
from megatron_dapo.rollout.server_options import Address
from megatron_dapo.rollout.vllm_server import EngineStartError, VllmServer, session_members
from tests.unit.config.runs import write_run
from tests.unit.rollout.test_vllm_server import options

TOKEN = "t" * 32
HEALTHY = """
import http.server, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        open(sys.argv[3], "a").write(self.path + "\\n")
        known = self.headers["Authorization"] == "Bearer " + sys.argv[2]
        self.send_response(200 if known else 401)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
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
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    yield token_file
    for number, handler in zip(HEARD, handlers, strict=True):
        signal.signal(number, handler)


def run_with(folder: Path, max_restarts: int) -> RunConfig:
    return load_config(write_run(folder), [f"rollout.max_restarts={max_restarts}"])


@pytest.mark.parametrize("most", [0, 2])
def test_the_servers_of_a_machine_are_restarted_as_often_as_configured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token_file: Path,
    most: int,
) -> None:
    engine = replace(options(tmp_path), address=Address("127.0.0.1", 9, token_file))
    monkeypatch.setattr(serve_module, "engine_options", lambda *_: engine)
    arguments = ["--config", str(write_run(tmp_path)), "--hosts", "a", "--first-port", "9"]
    assert serve_module.main([*arguments, f"rollout.max_restarts={most}"]) == 1
    told = capsys.readouterr().err
    assert f"lost {most + 1} times, at last: ended with exit code 1" in told
    assert told.endswith("\nlost\n") and "Traceback" not in told
    assert engine.log_file.read_text().splitlines() == ["lost"] * (most + 1)


def test_an_engine_ends_well_once_its_token_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    monkeypatch.setattr(vllm_server, "server_command", lambda options, socket: ["sleep", "600"])
    engine = replace(options(tmp_path), address=Address("127.0.0.1", 9, token_file))
    token_file.unlink()
    started = time.monotonic()
    assert serve_module.serve(engine, run_with(tmp_path, 0)) == 0
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
    assert serve_module.serve(engine, run_with(tmp_path, 1)) == 0
    assert len(ended.read_text().splitlines()) == 5


def test_a_server_that_hangs_is_killed_and_another_one_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = replace(options(tmp_path), address=Address("127.0.0.1", port, token_file))
    asked = tmp_path / "asked"
    asked.touch()
    command = [sys.executable, "-c", HEALTHY, str(port), TOKEN, str(asked)]
    monkeypatch.setattr(vllm_server, "server_command", lambda options, socket: command)
    sessions: list[int] = []
    start = VllmServer.start

    def started(server: VllmServer) -> None:
        start(server)
        assert server.pid is not None
        sessions.append(server.pid)

    monkeypatch.setattr(VllmServer, "start", started)

    def stop_the_first_and_end_with_the_second() -> None:
        wait_for(lambda: CORE in asked.read_text())  # it was seen to be ready
        for pid in session_members(sessions[0]):
            os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: len(sessions) == 2 and answers(port))
        token_file.unlink()

    beats = ("rollout.heartbeat_seconds=0.05", "rollout.heartbeat_timeout_seconds=5")
    config = load_config(write_run(tmp_path), ["rollout.max_restarts=1", *beats])
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(stop_the_first_and_end_with_the_second)
        assert serve_module.serve(engine, config) == 0
        done.result()
    assert [session_members(session) for session in sessions] == [[], []]


def test_a_server_that_never_gets_ready_is_lost_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    monkeypatch.setattr(vllm_server, "server_command", lambda options, socket: ["sleep", "600"])
    engine = replace(options(tmp_path), address=Address("127.0.0.1", 9, token_file))
    keys = ("rollout.max_restarts=0", "rollout.heartbeat_seconds=0.05")
    limit = "rollout.startup_timeout_seconds=1"
    config = load_config(write_run(tmp_path), [*keys, limit])
    with pytest.raises(EngineStartError, match=r"lost 1 times.*not ready within 1 s"):
        serve_module.serve(engine, config)


def answers(port: int) -> bool:
    try:
        url = f"http://127.0.0.1:{port}/health"
        return httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=0.5).is_success
    except httpx.TransportError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.01)
