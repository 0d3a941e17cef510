"""What a connection that the server closes says of the server."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from megatron_dapo.rollout.engine import EngineFault
from megatron_dapo.rollout.engine_http import EngineHttp
from megatron_dapo.rollout.health import SERVER, falls_silent

BROKEN = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n"
FINE = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


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
