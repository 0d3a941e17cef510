"""Who may speak to an engine with a port: the guard before vLLM's routes, and how it is started."""

from __future__ import annotations

import asyncio
import itertools
import stat
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.rollout.engine_http import engine_address
from megatron_dapo.rollout.remote_engines import wait_for_endpoints
from megatron_dapo.rollout.serve import engine_options
from megatron_dapo.rollout.server_options import GUARD, server_command, server_environment
from megatron_dapo.rollout.token_guard import TOKEN_FILE, TokenGuard, read_token
from megatron_dapo.rollout.vllm_server import EngineStartError
from tests.unit.config.runs import make_config

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(TOKEN)
    return file


def answer(guard: TokenGuard, kind: str, *headers: tuple[bytes, bytes]) -> list[dict[str, Any]]:
    """What the guard sends for one request; the app behind it says 200."""
    sent: list[dict[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))

    async def receive() -> MutableMapping[str, Any]:
        return {}

    scope = {"type": kind, "path": "/update_weights", "headers": list(headers)}
    asyncio.run(guard(scope, receive, send))
    return sent


@pytest.fixture
def guard(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> TokenGuard:
    monkeypatch.setenv(TOKEN_FILE, str(token_file))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "app", "status": 200})

    return TokenGuard(app)


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", TOKEN.encode()),),
        ((b"authorization", f"Bearer {TOKEN[:-1]}".encode()),),
        ((b"authorization", f"Bearer {TOKEN}0".encode()),),
        ((b"authorization", f"Basic {TOKEN}".encode()),),
        ((b"x-api-key", TOKEN.encode()),),
        ((b"authorization", b"\xff\xfe"),),
        ((b"authorization", b"Bearer x"), (b"authorization", f"Bearer {TOKEN}".encode())),
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_request_without_the_token_reaches_nothing(
    guard: TokenGuard, kind: str, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    sent = answer(guard, kind, *headers)
    assert all(message["type"] != "app" for message in sent)
    assert sent[0].get("status", sent[0].get("code")) == (401 if kind == "http" else 1008)


@pytest.mark.parametrize("name", [b"authorization", b"Authorization"])
def test_a_request_with_the_token_goes_through(guard: TokenGuard, name: bytes) -> None:
    assert answer(guard, "http", (name, f"Bearer {TOKEN}".encode()))[0]["type"] == "app"


def test_the_server_itself_needs_no_token(guard: TokenGuard) -> None:
    assert answer(guard, "lifespan")[0]["type"] == "app"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_token_that_others_may_read_is_refused(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(ValueError, match=rf"rollout\.token_file=.* mode {mode:o}.*chmod 600"):
        read_token(token_file)


@pytest.mark.parametrize("text", ["", "short", "0123456789 abcdef0123456789"])
def test_a_token_that_can_be_guessed_is_refused(token_file: Path, text: str) -> None:
    token_file.write_text(text)
    with pytest.raises(ValueError, match="at least 16 letters and digits"):
        read_token(token_file)


def test_an_engine_of_a_job_step_listens_at_its_nodes_address_behind_the_guard(
    token_file: Path, tmp_path: Path
) -> None:
    rollout = {"engines": 4, "engine_nodes": 2, "token_file": str(token_file)}
    place = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    options = engine_options(make_config(rollout=rollout), "127.0.0.3,127.0.0.4", 12000, place)
    command = server_command(options, tmp_path / "http")
    assert "--uds" not in command
    pairs = dict(itertools.pairwise(command))
    assert (pairs["--host"], pairs["--port"]) == ("127.0.0.4", "12003")
    assert pairs["--middleware"] == GUARD
    environment = server_environment(options, tmp_path, {"NCCL_SOCKET_IFNAME": "ib0"})
    assert environment[TOKEN_FILE] == str(token_file)
    assert environment["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "GLOO_SOCKET_IFNAME" not in environment
    assert TOKEN not in str(command) + str(environment)


def test_an_engine_without_a_token_is_not_started() -> None:
    place = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    with pytest.raises(ValueError, match=r"rollout\.token_file is not set"):
        engine_options(make_config(), "127.0.0.3", 12000, place)


def test_another_machine_is_only_spoken_to_with_a_token() -> None:
    with pytest.raises(ValueError, match=r"rollout\.token_file is not set"):
        engine_address("http://10.0.0.7:8000")
    assert engine_address("http://10.0.0.7:8000", with_token=True)[1] == "http://10.0.0.7:8000"


def test_an_engine_that_does_not_come_up_is_named(token_file: Path) -> None:
    endpoint = "http://127.0.0.1:9"
    rollout = {
        "endpoints": [endpoint],
        "token_file": str(token_file),
        "startup_timeout_seconds": 1,
    }
    with pytest.raises(EngineStartError, match=rf"{endpoint} is not ready .*after"):
        wait_for_endpoints(make_config(rollout=rollout).rollout)
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
