"""The connection to one vLLM server: local addresses only, retries where they are harmless."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from copy import copy
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from megatron_dapo.config.endpoint_checks import LOOPBACK_HOSTS
from megatron_dapo.rollout.engine import EngineError, EngineFault, EngineUnavailable

logger = logging.getLogger(__name__)

ATTEMPTS = 5
FIRST_BACKOFF_SECONDS = 0.2
CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 2.0
"""Idle connections are given up before the server (after 5 s) closes them under a request."""
NOT_REACHED = (aiohttp.ClientConnectorError,)
"""Nothing was sent."""
BROKEN = (
    aiohttp.ClientOSError,
    aiohttp.ClientConnectionResetError,
    aiohttp.ServerDisconnectedError,
    aiohttp.ClientPayloadError,
    aiohttp.ClientResponseError,
)
"""The connection ended, or what came is no HTTP: the server may have got the request."""

AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)


def engine_address(endpoint: str, *, with_token: bool = False) -> tuple[str | None, str]:
    """Socket (None: over TCP) and base URL of `unix:/path`, `http://127.0.0.1:port` or, with a
    token, any host.

    Raises:
        ValueError: any other address. vLLM's control routes have no authentication of their own, so
            an engine that can be reached without a token could be given other weights by anyone.
    """
    if endpoint.startswith("unix:/"):
        return endpoint.removeprefix("unix:"), "http://engine"
    url = urlsplit(endpoint)
    near = url.hostname in LOOPBACK_HOSTS or (with_token and url.hostname is not None)
    if url.scheme == "http" and near and url.port is not None:
        return None, endpoint.rstrip("/")
    raise ValueError(
        f"rollout.endpoints: {endpoint!r} is neither unix:/path nor http://127.0.0.1:port, and "
        "rollout.token_file is not set. vLLM's weight routes have no authentication of their own: "
        "start the engine with a token, or bring it here through an SSH tunnel or a unix socket"
    )


def bearer(token: str | None) -> dict[str, str]:
    """The header that `token_guard.TokenGuard` asks for."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def open_session(socket: str | None, url: str, headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """As many connections as requests; finding one costs the same however many there are."""
    connector = (
        aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        if socket is None
        else aiohttp.UnixConnector(socket, limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    )
    return aiohttp.ClientSession(
        url,
        connector=connector,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


class EngineHttp:
    """Requests to one server. Create and use it inside one event loop.

    Args:
        endpoint: unix:/path or http://127.0.0.1:port.
        label: what messages call the server.
        timeout_seconds: longest wait for one answer.
        token: that the server asks for (`token_guard`); None: it asks for none.
    """

    def __init__(
        self, endpoint: str, *, label: str, timeout_seconds: float, token: str | None = None
    ) -> None:
        socket, url = engine_address(endpoint, with_token=token is not None)
        self.label = label
        self._seconds = timeout_seconds
        self._session = open_session(socket, url, bearer(token))

    def within(self, seconds: float) -> EngineHttp:
        """The same connections, but no answer is waited for longer than this."""
        other = copy(self)
        other._seconds = seconds
        return other

    async def send(
        self, method: str, path: str, body: object = None, *, repeatable: bool = False
    ) -> bytes:
        """Body of the answer. `repeatable`: also try again when the connection broke half-way.

        Raises:
            EngineUnavailable: the server cannot be reached, or the connection broke.
            EngineError: it answered with an error; EngineFault for 5xx.
        """
        retried: tuple[type[aiohttp.ClientError], ...] = BROKEN if repeatable else NOT_REACHED
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                status, answer = await self._exchange(method, path, body)
            except retried as error:
                failure: Exception = error
                logger.warning("%s %s: %r, attempt %d", self.label, path, error, attempt + 1)
                continue
            except aiohttp.ClientError as error:
                raise EngineUnavailable(
                    f"{self.label} did not answer {method} {path}: {error!r}"
                ) from error
            except TimeoutError as error:
                raise EngineUnavailable(
                    f"{self.label} did not answer {method} {path} within {self._seconds:g} s: it "
                    "hangs, or needs longer"
                ) from error
            if 200 <= status < 300:
                return answer
            failed = EngineFault if status >= 500 else EngineError
            said = answer.decode(errors="replace")[:2000]
            raise failed(f"{self.label} answered {status} to {method} {path}: {said}")
        raise EngineUnavailable(
            f"{self.label} cannot be reached for {method} {path} after {ATTEMPTS} attempts: "
            f"{failure!r}. The engine's log says why"
        ) from failure

    async def _exchange(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Status and body of one answer."""
        limits = aiohttp.ClientTimeout(total=self._seconds, sock_connect=CONNECT_SECONDS)
        async with self._session.request(
            method, path, json=body, timeout=limits, allow_redirects=False
        ) as answer:
            return answer.status, await answer.read()

    async def status(self, path: str) -> int | None:
        """Of the answer to GET; None: no connection, or it took too long.

        A server closes the connection of an answer that something broke, and may do so only while
        it is used again: a connection that breaks says nothing before a new one does, too.
        """
        for _ in range(2):
            try:
                return (await self._exchange("GET", path))[0]
            except (*NOT_REACHED, TimeoutError):
                return None
            except aiohttp.ClientError:
                continue
        return None

    async def ask(
        self,
        form: type[AnswerT],
        method: str,
        path: str,
        body: object = None,
        *,
        repeatable: bool = False,
    ) -> AnswerT:
        """`send`, and the answer as a `form`.

        Raises:
            EngineError: also when the answer has another form.
        """
        answer = await self.send(method, path, body, repeatable=repeatable)
        try:
            return msgspec.json.decode(answer, type=form)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineError(
                f"{self.label} answered {path} in an unknown form: {str(error)[:2000]}"
            ) from error

    async def close(self) -> None:
        await self._session.close()
