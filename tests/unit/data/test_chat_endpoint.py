from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator

import pytest

from megatron_dapo.data import chat_endpoint
from megatron_dapo.data.chat_endpoint import FAILED, ChatEndpoint, RequestRefused
from tests.unit.data.chat_server import ChatServer, completion, running_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setattr(chat_endpoint, "FIRST_BACKOFF_SECONDS", 0.001)
    with running_server() as server:
        yield server


def ask(url: str, **options: object) -> str:
    async def reply() -> str:
        async with ChatEndpoint(url, **options) as model:  # type: ignore[arg-type]
            return await model.reply([{"role": "user", "content": "hello"}], seed=5)

    return asyncio.run(reply())


def test_a_conversation_goes_out_and_the_reply_comes_back(server: ChatServer) -> None:
    server.answers = [(200, completion("good day"))]
    assert ask(f"{server.url}/v1", temperature=0.5) == "good day"
    ((path, key, body),) = server.got
    assert (path, key) == ("/v1/chat/completions", None)
    assert (body["model"], body["seed"], body["temperature"]) == ("served", 5, 0.5)
    assert body["messages"] == [{"role": "user", "content": "hello"}]


def test_a_busy_server_is_asked_again(server: ChatServer) -> None:
    server.answers = [(503, {}), (429, {}), (200, completion(None))]
    assert ask(server.url, model="mine") == ""
    assert len(server.got) == 3
    assert server.got[0][2]["model"] == "mine"


def test_a_request_that_is_refused_is_told_from_a_broken_server(server: ChatServer) -> None:
    server.answers = [(400, {"error": "too long"})]
    with pytest.raises(RequestRefused, match="too long"):
        ask(server.url)
    server.answers = [(500, {})]
    with pytest.raises(RuntimeError, match="does not answer"):
        ask(server.url)
    server.answers = [(401, {})]
    with pytest.raises(RuntimeError, match="401"):
        ask(server.url)
    server.answers = [(200, {"choices": []})]
    with pytest.raises(RuntimeError, match="no OpenAI-compatible server"):
        ask(server.url)


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (500, {"error": "an assertion"}, "500: .*an assertion"),
        (504, {}, "504"),
        (0, {}, "disconnected"),
        (200, {"choices": []}, "no completion: "),
    ],
)
def test_a_request_that_a_living_server_always_fails_over_is_told_from_a_broken_server(
    server: ChatServer, status: int, body: object, told: str
) -> None:
    fails = True

    def answer(last: str) -> tuple[int, object]:
        return (status, body) if fails and last == "hello" else (200, completion("yes"))

    server.answer = answer
    with pytest.raises(RequestRefused, match=told) as refused:
        ask(server.url)
    assert refused.value.reason == FAILED
    assert 3 <= len(server.got) <= chat_endpoint.ATTEMPTS + 2
    fails = False
    assert ask(server.url) == "yes"


def test_a_server_that_was_away_for_a_while_is_asked_once_more(server: ChatServer) -> None:
    away = [(503, {})] * chat_endpoint.ATTEMPTS
    server.answers = [*away, (200, completion("y")), (200, completion("good day"))]
    assert ask(server.url) == "good day"


def test_a_server_that_is_busy_for_long_stops_the_work_and_rejects_nothing(
    server: ChatServer,
) -> None:
    busy = [(429, {})] * chat_endpoint.ATTEMPTS
    server.answers = [*busy, (200, completion("yes"))]
    with pytest.raises(RuntimeError, match="429"):
        ask(server.url)


def test_a_server_that_is_not_there_is_named(server: ChatServer) -> None:
    with pytest.raises(RuntimeError, match=r"unix:/nowhere/socket.*start the same command again"):
        ask("unix:/nowhere/socket", model="mine")


def test_other_machines_are_asked_only_when_told() -> None:
    with pytest.raises(ValueError, match="on another machine"):
        ChatEndpoint("https://example.com/v1")
    with pytest.raises(ValueError, match="must be unix:/path"):
        ChatEndpoint("example.com")
    ChatEndpoint("https://example.com/v1", remote=True)
    ChatEndpoint("http://[::1]:8000")


def test_a_key_comes_from_the_environment_only(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [(200, completion("yes"))]
    with pytest.raises(ValueError, match="CHAT_KEY is not set"):
        ask(server.url, api_key_variable="CHAT_KEY")
    monkeypatch.setenv("CHAT_KEY", "canary")
    ask(server.url, api_key_variable="CHAT_KEY")
    assert server.got[0][1] == "Bearer canary"


def test_all_requests_are_under_way_at_once() -> None:
    together, waiting = 150, 0
    body = json.dumps(completion("yes")).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def ask_together() -> list[str]:
        all_there = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal waiting
            await reader.readuntil(b"\r\n\r\n")
            waiting += 1
            if waiting == together:
                all_there.set()
            await all_there.wait()
            writer.write(head + body)
            await writer.drain()
            writer.close()

        question = [{"role": "user", "content": "hello"}]
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path is short
            socket = f"{folder}/s"
            listening = await asyncio.start_unix_server(serve, socket, backlog=together)
            try:
                async with ChatEndpoint(f"unix:{socket}", model="any") as model:
                    replies = (model.reply(question, seed=seed) for seed in range(together))  # type: ignore[arg-type]
                    return await asyncio.gather(*replies)
            finally:
                listening.close()

    assert asyncio.run(ask_together()) == ["yes"] * together
