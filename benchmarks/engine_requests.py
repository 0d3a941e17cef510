"""What one request to an engine costs rank 0, with many under way at once.

    python benchmarks/engine_requests.py [--requests 64 256 1024] [--repeats 3]

A server of its own process answers each request, of 200 prompt tokens, with 400 tokens and their
log-probs after one second, as an engine does that works on all of them together. The floor is a
plain socket stream for each request, without any HTTP client; the peer is httpx, whose pool looks
at every connection for every request. CPU milliseconds a request of the client's process, best of
`--repeats`. Fails where `EngineHttp` needs more than five times the floor.

Then what reading one answer costs, of 5,000 tokens in vLLM's form; the peer is `json.loads` alone,
which checks nothing. Fails where the checked reading is slower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import msgspec

from megatron_dapo.rollout.engine_http import KEEP_ALIVE_SECONDS, EngineHttp
from megatron_dapo.rollout.generate_route import GenerateResponse

SECONDS = 1.0
PATH = "/inference/v1/generate"
REQUEST = {
    "request_id": "train-1-0-3",
    "token_ids": list(range(200)),
    "sampling_params": {"seed": 1, "temperature": 1.0, "max_tokens": 400},
}
ANSWER = json.dumps({"token_ids": list(range(400)), "logprobs": [-0.125] * 400}).encode()
HEAD = f"HTTP/1.1 200 OK\r\ncontent-length: {len(ANSWER)}\r\n\r\n".encode()
MOST_TIMES_THE_FLOOR = 5.0
Exchange = Callable[[], Awaitable[bytes]]


async def serve_forever(socket: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
            except asyncio.IncompleteReadError:
                break
            length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
            await reader.readexactly(int(length))
            await asyncio.sleep(SECONDS)
            writer.write(HEAD + ANSWER)
        writer.close()

    server = await asyncio.start_unix_server(serve, socket, backlog=8192)
    await server.serve_forever()


def run_server(socket: Path) -> None:
    asyncio.run(serve_forever(socket))


async def floor(socket: Path, together: int) -> float:
    async def exchange() -> bytes:
        reader, writer = await asyncio.open_unix_connection(socket)
        body = json.dumps(REQUEST).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        answer = await reader.readexactly(len(ANSWER))
        writer.close()
        return answer

    return await cpu_milliseconds(exchange, together)


async def ours(socket: Path, together: int) -> float:
    http = EngineHttp(f"unix:{socket}", label="engine", timeout_seconds=600.0)
    try:
        return await cpu_milliseconds(lambda: http.send("POST", PATH, REQUEST), together)
    finally:
        await http.close()


async def peer(socket: Path, together: int) -> float:
    limits = httpx.Limits(
        max_connections=None,
        max_keepalive_connections=None,
        keepalive_expiry=KEEP_ALIVE_SECONDS,
    )
    transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=limits)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://engine", timeout=600.0, trust_env=False
    ) as client:

        async def exchange() -> bytes:
            return (await client.post(PATH, json=REQUEST)).content

        return await cpu_milliseconds(exchange, together)


async def cpu_milliseconds(exchange: Exchange, together: int) -> float:
    """Of one `exchange` of `together` at once, each read to its end."""
    started = time.process_time()
    answers = await asyncio.gather(*(exchange() for _ in range(together)))
    seconds = time.process_time() - started
    assert all(json.loads(answer) for answer in answers[:1])
    return 1000 * seconds / together


def measure(client: Callable[[Path, int], Awaitable[float]], together: int, repeats: int) -> float:
    """Best of `repeats`, each with a server and connections of its own."""

    async def once(socket: Path) -> float:
        return await client(socket, together)

    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            socket = Path(folder) / "s"
            server = multiprocessing.Process(target=run_server, args=(socket,), daemon=True)
            server.start()
            while not socket.exists():
                time.sleep(0.01)
            try:
                found.append(asyncio.run(once(socket)))
            finally:
                server.kill()
                server.join()
    return min(found)


def long_answer(tokens: int) -> bytes:
    """As the route writes it, without alternatives."""
    ids = [random.randrange(151_936) for _ in range(tokens)]
    content = [
        {"token": f"token_id:{i}", "logprob": -random.random(), "bytes": None, "top_logprobs": []}
        for i in ids
    ]
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": ids,
        "weight_versions": [{"version": "3", "start": 0}],
    }
    return json.dumps({"request_id": "train-1-0-3", "choices": [choice]}).encode()


def reading_milliseconds(read: Callable[[bytes], object], answer: bytes, repeats: int) -> float:
    found = []
    for _ in range(repeats):
        started = time.process_time()
        for _ in range(20):
            read(answer)
        found.append(1000 * (time.process_time() - started) / 20)
    return min(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    worst = 0.0
    print("requests at once | floor ms | EngineHttp ms | httpx ms | of floor | httpx / EngineHttp")
    for together in arguments.requests:
        least, mine, theirs = (
            measure(client, together, arguments.repeats) for client in (floor, ours, peer)
        )
        worst = max(worst, mine / least)
        ratios = f"{mine / least:.1f} | {theirs / mine:.0f}"
        print(f"{together} | {least:.3f} | {mine:.3f} | {theirs:.2f} | {ratios}", flush=True)
    answer = long_answer(5000)
    mine = reading_milliseconds(
        lambda text: msgspec.json.decode(text, type=GenerateResponse), answer, arguments.repeats
    )
    theirs = reading_milliseconds(json.loads, answer, arguments.repeats)
    print(f"reading {len(answer) / 1000:.0f} kB: {mine:.2f} ms; json.loads {theirs:.2f} ms")
    return int(worst > MOST_TIMES_THE_FLOOR or mine > theirs)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    raise SystemExit(main())
