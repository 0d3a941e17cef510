"""One server over HTTP: many requests at once, connections that break, answers that are none."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from megatron_dapo.rollout import engine_http
from megatron_dapo.rollout.engine import EngineError, EngineFault, EngineUnavailable
from megatron_dapo.rollout.engine_http import EngineHttp
from megatron_dapo.rollout.health import SERVER, falls_silent

BROKEN = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n"
FINE = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
TOKEN = "0123456789abcdef"
Answer = Callable[[bytes], Awaitable[bytes]]


@asynccontextmanager
async def server(*, ends: bool) -> AsyncIterator[EngineHttp]:
    """Answers POST with 500 and hangs up at the next request there; `ends`: at every one after."""
    broke = False

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal broke
        here = False
        while line := await reader.readline():
            while await reader.readline() not in (b"\r\n", b""):
                pass
            if here or (broke and ends):
                break
            if line.startswith(b"POST"):
                broke = here = True
            writer.write(BROKEN if here else FINE)
            await writer.drain()
        writer.close()

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "s"
        listening = await asyncio.start_unix_server(serve, path)
        http = EngineHttp(f"unix:{path}", label="engine", timeout_seconds=5.0)
        try:
            yield http
        finally:
            await http.close()
            listening.close()


@pytest.mark.parametrize("ends", [False, True])
def test_a_server_that_hangs_up_after_a_fault_is_lost_only_if_it_does_so_again(ends: bool) -> None:
    async def look() -> bool:
        async with server(ends=ends) as http:
            with pytest.raises(EngineFault, match="500"):
                await http.send("POST", "/update_weights")
            return await falls_silent(http.status)

    assert asyncio.run(look()) is ends


def test_a_server_that_is_not_there_has_no_status() -> None:
    async def look() -> int | None:
        http = EngineHttp("unix:/tmp/nobody_listens_here", label="engine", timeout_seconds=1.0)
        try:
            return await http.status(SERVER)
        finally:
            await http.close()

    assert asyncio.run(look()) is None


@asynccontextmanager
async def answering(answer: Answer, *, token: str | None = None) -> AsyncIterator[EngineHttp]:
    """Each connection gets what `answer` makes of a request's head, and is closed after it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await answer(await reader.readuntil(b"\r\n\r\n")))
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    http = EngineHttp(
        f"http://127.0.0.1:{port}/", label="engine", timeout_seconds=60.0, token=token
    )
    try:
        yield http
    finally:
        await http.close()
        listening.close()


def test_all_requests_are_under_way_at_once() -> None:
    together, waiting = 400, 0

    async def call() -> list[bytes]:
        all_there = asyncio.Event()

        async def answer(head: bytes) -> bytes:
            nonlocal waiting
            waiting += 1
            if waiting == together:
                all_there.set()
            await all_there.wait()
            name = head.split()[1]
            return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(name), name)

        async with answering(answer) as http:
            return await asyncio.gather(*(http.send("POST", f"/{n}") for n in range(together)))

    assert asyncio.run(call()) == [b"/%d" % n for n in range(together)]


def test_requests_carry_the_token_and_nothing_is_followed_with_it() -> None:
    heads: list[bytes] = []

    async def answer(head: bytes) -> bytes:
        heads.append(head)
        return b"HTTP/1.1 307 Away\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n"

    async def call() -> None:
        async with answering(answer, token=TOKEN) as http:
            with pytest.raises(EngineError, match="answered 307 to POST /somewhere"):
                await http.send("POST", "/somewhere")

    asyncio.run(call())
    assert len(heads) == 1
    assert f"Authorization: Bearer {TOKEN}".encode() in heads[0]


@pytest.mark.parametrize(
    "broken",
    [b"", b"no HTTP at all\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"],
    ids=["hangs up", "no HTTP", "half an answer"],
)
@pytest.mark.parametrize("repeatable", [False, True])
def test_a_broken_exchange_is_repeated_only_where_that_is_harmless(
    broken: bytes, repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_http, "FIRST_BACKOFF_SECONDS", 0.001)
    asked = 0

    async def answer(_head: bytes) -> bytes:
        nonlocal asked
        asked += 1
        return broken if asked == 1 else FINE

    async def call() -> None:
        async with answering(answer) as http:
            if repeatable:
                assert await http.send("POST", "/generate", repeatable=True) == b""
            else:
                with pytest.raises(EngineUnavailable, match="did not answer POST /generate"):
                    await http.send("POST", "/generate")

    asyncio.run(call())
    assert asked == 1 + repeatable


def test_a_server_that_never_answers_is_waited_for_no_longer_than_said() -> None:
    async def answer(_head: bytes) -> bytes:
        await asyncio.sleep(600)
        return FINE

    async def call() -> None:
        async with answering(answer) as http:
            with pytest.raises(EngineUnavailable, match=r"within 0\.2 s: it hangs"):
                await http.within(0.2).send("GET", "/health", repeatable=True)
            assert await http.within(0.2).status("/health") is None

    asyncio.run(call())
