"""The client against a scripted HTTP server on a unix socket."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from megatron_dapo.rollout import vllm_engine
from megatron_dapo.rollout.engine import EngineError, EngineUnavailable, GenerationRequest
from megatron_dapo.rollout.vllm_engine import VllmEngine, open_transport

ResultT = TypeVar("ResultT")
PAYLOAD = {"path": "/dev/shm/w/policy_4.safetensors", "policy_version": 4}
REQUEST = GenerationRequest(
    prompt_token_ids=(3, 4),
    seed=2**62,
    temperature=0.7,
    top_p=0.9,
    top_k=-1,
    max_tokens=5,
    stop_token_ids=(2, 9),
    request_id="train-1-0-3",
)


@dataclass
class ScriptedServer:
    """Answers by path; keeps what it was sent. A path in `drops` loses that many connections."""

    socket: Path
    drops: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    received: list[tuple[str, object]] = field(default_factory=list)
    version: str = "default"
    keeps_version: bool = False
    reset_succeeds: bool = True
    finish_reason: str = "stop"

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.received]

    def answer(self, path: str, body: object) -> object:
        if path == "/inference/v1/generate":
            logprobs = {"content": [{"token_id": t, "logprob": -t / 4} for t in (7, 2)]}
            choice = {
                "index": 0,
                "token_ids": [7, 2],
                "logprobs": logprobs,
                "finish_reason": self.finish_reason,
                "stop_reason": 2,
                "weight_versions": [{"version": self.version, "start": 0, "end": 2}],
            }
            return {"request_id": "x", "choices": [choice]}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/reset_prefix_cache":
            return {"success": self.reset_succeeds}
        if path == "/update_weight_version" and not self.keeps_version:
            assert isinstance(body, dict)
            self.version = body["new_version"]
        return {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split()[1].decode()
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            raw = await reader.readexactly(int(fields.get(b"content-length", 0)))
            body = json.loads(raw) if raw else None
            self.received.append((path, body))
            if self.drops.get(path, 0) > 0:
                self.drops[path] -= 1
                break
            status = self.errors.get(path, 200)
            text = json.dumps(self.answer(path, body)).encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(text)))
            writer.write(text)
            await writer.drain()
        writer.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setattr(vllm_engine, "FIRST_BACKOFF_SECONDS", 0.001)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield ScriptedServer(Path(folder) / "s")


def talk(server: ScriptedServer, call: Callable[[VllmEngine], Awaitable[ResultT]]) -> ResultT:
    async def body() -> ResultT:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await server.serve(reader, writer)
            except asyncio.IncompleteReadError:
                writer.close()

        listening = await asyncio.start_unix_server(connected, server.socket)
        engine = VllmEngine(f"unix:{server.socket}", request_timeout_seconds=5)
        try:
            return await call(engine)
        finally:
            await engine.close()
            listening.close()

    return asyncio.run(body())


def test_token_ids_go_in_and_come_out(server: ScriptedServer) -> None:
    result = talk(server, lambda engine: engine.generate(REQUEST))
    assert result.token_ids == (7, 2)
    assert result.logprobs == (-1.75, -0.5)
    assert result.finish_reason == "stop"
    assert result.policy_version == 0
    path, body = server.received[0]
    assert path == "/inference/v1/generate"
    assert isinstance(body, dict)
    assert body["token_ids"] == [3, 4]
    assert body["request_id"] == "train-1-0-3"
    assert body["sampling_params"] == {
        "seed": 2**62,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "max_tokens": 5,
        "stop_token_ids": [2, 9],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def test_the_version_of_the_first_token_is_reported(server: ScriptedServer) -> None:
    server.version = "17"
    assert talk(server, lambda engine: engine.generate(REQUEST)).policy_version == 17


def test_an_unknown_finish_reason_is_an_error(server: ScriptedServer) -> None:
    server.finish_reason = "repetition"
    with pytest.raises(EngineError, match="unknown form"):
        talk(server, lambda engine: engine.generate(REQUEST))


def test_a_lost_connection_is_tried_again_with_the_same_request(server: ScriptedServer) -> None:
    server.drops["/inference/v1/generate"] = 2
    assert talk(server, lambda engine: engine.generate(REQUEST)).token_ids == (7, 2)
    assert len(server.received) == 3
    assert server.received[0] == server.received[1] == server.received[2]


def test_attempts_are_limited(server: ScriptedServer) -> None:
    server.drops["/inference/v1/generate"] = 99
    with pytest.raises(EngineUnavailable, match="after 5 attempts"):
        talk(server, lambda engine: engine.generate(REQUEST))
    assert len(server.received) == 5


def test_a_missing_socket_is_unavailable(server: ScriptedServer) -> None:
    async def call() -> None:
        engine = VllmEngine("unix:/nowhere/at/all")
        try:
            await engine.generate(REQUEST)
        finally:
            await engine.close()

    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        asyncio.run(call())


@pytest.mark.parametrize("status", [400, 404, 500])
def test_a_refusal_is_not_tried_again(server: ScriptedServer, status: int) -> None:
    server.errors["/inference/v1/generate"] = status
    with pytest.raises(EngineError, match=f"answered {status}"):
        talk(server, lambda engine: engine.generate(REQUEST))
    assert len(server.received) == 1


UPDATE_ORDER = [
    "/init_weight_transfer_engine",
    "/pause?mode=wait&clear_cache=false",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/weight_info",
    "/resume",
]


def test_an_update_goes_through_every_step_in_order(server: ScriptedServer) -> None:
    async def twice(engine: VllmEngine) -> int:
        await engine.update_weights(PAYLOAD, 4)
        await engine.update_weights(PAYLOAD, 5)
        return (await engine.generate(REQUEST)).policy_version

    assert talk(server, twice) == 5
    assert server.paths == [*UPDATE_ORDER, *UPDATE_ORDER[1:], "/inference/v1/generate"]
    sent = dict(server.received)
    assert sent["/init_weight_transfer_engine"] == {"init_info": {"directory": "/dev/shm/w"}}
    assert sent["/update_weights"] == {"update_info": PAYLOAD}


@pytest.mark.parametrize("step", UPDATE_ORDER[1:])
def test_an_engine_with_a_failed_update_is_not_used_again(
    server: ScriptedServer, step: str
) -> None:
    server.errors[step] = 500

    async def use(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match="answered 500"):
            await engine.update_weights(PAYLOAD, 4)
        for again in (engine.generate(REQUEST), engine.update_weights(PAYLOAD, 4)):
            with pytest.raises(EngineError, match="restart the engine"):
                await again

    talk(server, use)
    assert server.paths == UPDATE_ORDER[: UPDATE_ORDER.index(step) + 1]


def test_a_step_of_an_update_is_never_sent_twice(server: ScriptedServer) -> None:
    server.drops["/update_weights"] = 1
    with pytest.raises(EngineUnavailable, match="did not answer POST /update_weights"):
        talk(server, lambda engine: engine.update_weights(PAYLOAD, 4))
    assert server.paths.count("/update_weights") == 1


def test_an_engine_that_keeps_its_old_version_is_found_out(server: ScriptedServer) -> None:
    server.keeps_version = True
    server.version = "3"
    with pytest.raises(EngineError, match="serves weight version 3 after the update to version 4"):
        talk(server, lambda engine: engine.update_weights(PAYLOAD, 4))


def test_a_cache_that_cannot_be_reset_is_an_error(server: ScriptedServer) -> None:
    server.reset_succeeds = False
    with pytest.raises(EngineError, match="could not reset its prefix cache"):
        talk(server, lambda engine: engine.update_weights(PAYLOAD, 4))


def test_sleep_does_nothing_without_sleep_mode(server: ScriptedServer) -> None:
    async def nap(engine: VllmEngine) -> None:
        await engine.sleep()
        await engine.wake_up("weights")
        engine.sleep_mode = True
        await engine.sleep()
        await engine.wake_up("weights")
        await engine.wake_up("kv_cache")

    talk(server, nap)
    assert server.paths == [
        "/sleep?level=2&mode=wait",
        "/wake_up?tags=weights",
        "/wake_up?tags=kv_cache",
    ]


@pytest.mark.parametrize(
    "endpoint", ["unix:/tmp/x", "http://127.0.0.1:8000", "http://localhost:8000/", "http://[::1]:1"]
)
def test_local_addresses_are_accepted(endpoint: str) -> None:
    open_transport(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://10.0.0.3:8000",
        "http://0.0.0.0:8000",
        "http://127.0.0.1.evil.org:80",
        "http://127.0.0.1",
        "https://127.0.0.1:8000",
        "unix:relative",
        "node3:8000",
        "",
    ],
)
def test_other_addresses_are_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.endpoints"):
        open_transport(endpoint)
