"""A vLLM server as far as its routes go: paused, updated, stamped and asked over a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megatron_dapo.rollout.engine import GenerationRequest
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.weight_update import InFlight

ResultT = TypeVar("ResultT")
GENERATE = "/inference/v1/generate"
HEARTBEAT = ("/health", "/is_paused")
INITIAL = "default"
INFO = {"directory": "/dev/shm/w"}
PAYLOAD = {"path": "/dev/shm/w/policy_4.safetensors", "policy_version": 4}
REQUEST = GenerationRequest(
    prompt_token_ids=(3, 4),
    seed=2**62,
    temperature=0.7,
    top_p=0.9,
    top_k=-1,
    max_tokens=40,
    stop_token_ids=(2, 9),
    request_id="train-1-0-3",
)


@dataclass
class ScriptedServer:
    """Answers by path; keeps what it was sent. A path in `drops` loses that many connections, one
    in `hangs` gets no answer.

    A request samples `tokens` one by one, each stamped with the version of its moment. Paused by
    mode "wait" the server finishes what runs and lets nothing start, by "keep" all stands still.
    """

    socket: Path
    drops: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    received: list[tuple[str, object]] = field(default_factory=list)
    version: str = INITIAL
    keeps_version: bool = False
    reset_succeeds: bool = True
    finish_reason: str = "stop"
    tokens: list[int] = field(default_factory=lambda: [7, 2])
    logprobs: list[float] = field(default_factory=lambda: [-1.75, -0.5])
    seconds_per_token: float = 0.0
    says_versions: bool = True
    digests: list[dict[str, str]] = field(default_factory=lambda: [{"w": "0a"}])
    hangs: set[str] = field(default_factory=set)
    """Paths that are never answered."""
    hang_seconds: float = 0.0
    """By which one of them puts the clock of `talk` forward: nobody has to wait for its end."""
    seconds_ahead: float = 0.0
    """Of that clock."""
    running: int = 0
    sampled: int = 0
    beats: int = 0
    """Questions whether it lives, which are not kept."""
    answers_late: bool = False
    """Calls of the workers get the answer of the call before."""
    late_answer: str = "of another run"
    aborted: set[str] = field(default_factory=set)
    """Ids that /abort_requests named, as vLLM knows them."""
    _starts: asyncio.Event = field(default_factory=asyncio.Event)
    _steps: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _connections: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.received]

    @property
    def paused(self) -> bool:
        return not self._starts.is_set()

    async def open(self) -> None:
        """Start as a fresh server does: unpaused, with the weights of its folder."""
        self.version = INITIAL
        self._starts.set()
        self._steps.set()
        self.socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, self.socket)

    async def close(self) -> None:
        """End at once: nobody listens, and every connection breaks."""
        assert self._server is not None
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()
        self.socket.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._serve(reader, writer)
        self._connections.discard(writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split()[1].decode()
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            raw = await reader.readexactly(int(fields.get(b"content-length", 0)))
            body = json.loads(raw) if raw else None
            if path in HEARTBEAT:
                self.beats += 1
            else:
                self.received.append((path, body))
            if path in self.hangs:
                self.seconds_ahead += self.hang_seconds
            while path in self.hangs:
                await asyncio.sleep(0.001)
            if self.drops.get(path, 0) > 0:
                self.drops[path] -= 1
                return
            status = self.errors.get(path, 200)
            text = json.dumps(await self._answer(path, body)).encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(text)))
            writer.write(text)
            await writer.drain()

    async def _answer(self, path: str, body: object) -> object:
        if path == GENERATE:
            assert isinstance(body, dict)
            return await self._generate(f"generate-tokens-{body['request_id']}")
        if path == "/abort_requests":
            assert isinstance(body, dict)
            self.aborted |= set(body["request_ids"])
        if path.startswith("/pause"):
            self._starts.clear()
            if "mode=keep" in path:
                self._steps.clear()
            while self.running and self._steps.is_set():
                await asyncio.sleep(0.001)
        if path == "/resume":
            self._starts.set()
            self._steps.set()
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path.startswith("/reset_prefix_cache"):
            return {"success": self.reset_succeeds}
        if path == "/update_weight_version" and not self.keeps_version:
            assert isinstance(body, dict)
            self.version = body["new_version"]
        if path == "/collective_rpc":
            assert isinstance(body, dict)
            if body["method"] == "end_open_update":
                (asked,) = body["args"]
                if self.answers_late:
                    asked, self.late_answer = self.late_answer, asked
                return {"results": [asked] * len(self.digests)}
            reports = [{"rank": rank} for rank in range(len(self.digests))]
            return {"results": self.digests if body["method"] == "weight_digests" else reports}
        return {}

    async def _generate(self, name: str) -> object:
        self.aborted.discard(name)  # what was aborted before it came is not aborted
        await self._wait(self._starts, name)
        self.running += 1
        spans: list[dict[str, object]] = []
        done = 0
        while done < len(self.tokens) and name not in self.aborted:
            await asyncio.sleep(self.seconds_per_token)
            await self._wait(self._steps, name)
            if name in self.aborted:
                break
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": done})
            spans[-1]["end"] = done + 1
            self.sampled += 1
            done += 1
        self.running -= 1
        logprobs = self.logprobs[:done]
        choice = {
            "index": 0,
            "token_ids": self.tokens[:done],
            "logprobs": {"content": [{"token_id": 0, "logprob": p} for p in logprobs]},
            "finish_reason": "abort" if name in self.aborted else self.finish_reason,
            "stop_reason": 2,
            "weight_versions": spans if self.says_versions else None,
        }
        return {"request_id": "x", "choices": [choice]}

    async def _wait(self, event: asyncio.Event, name: str) -> None:
        """For the event, or until the request is aborted."""
        while not event.is_set() and name not in self.aborted:
            await asyncio.sleep(0.001)


def talk(
    server: ScriptedServer,
    call: Callable[[VllmEngine], Awaitable[ResultT]],
    *,
    in_flight: InFlight = "wait",
    fresh: bool = False,
    update_seconds: float = 60.0,
) -> ResultT:
    """`call` with a client that takes the weights of the server, unless `fresh`."""

    async def body() -> ResultT:
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + server.seconds_ahead  # type: ignore[method-assign]
        await server.open()
        engine = VllmEngine(
            f"unix:{server.socket}",
            request_timeout_seconds=3600,
            update_timeout_seconds=update_seconds,
            in_flight=in_flight,
        )
        try:
            if not fresh:
                await engine.adopt()
                server.received.clear()
            return await call(engine)
        finally:
            await engine.close()
            await server.close()

    return asyncio.run(body())
