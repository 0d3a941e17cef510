"""The connection to one vLLM server: local addresses only, retries where they are harmless."""

from __future__ import annotations

import asyncio
import logging
from copy import copy
from typing import TypeVar

import httpx
import pydantic

from megatron_dapo.config.endpoint_checks import LOOPBACK_HOSTS
from megatron_dapo.rollout.engine import EngineError, EngineFault, EngineUnavailable

logger = logging.getLogger(__name__)

ATTEMPTS = 5
FIRST_BACKOFF_SECONDS = 0.2
CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 2.0
"""Idle connections are given up before the server (after 5 s) closes them under a request."""

AnswerT = TypeVar("AnswerT", bound=pydantic.BaseModel)


def open_transport(
    endpoint: str, *, with_token: bool = False
) -> tuple[httpx.AsyncBaseTransport, str]:
    """Transport and base URL of `unix:/path`, `http://127.0.0.1:port` or, with a token, any host.

    Raises:
        ValueError: any other address. vLLM's control routes have no authentication of their own, so
            an engine that can be reached without a token could be given other weights by anyone.
    """
    limits = httpx.Limits(
        max_connections=None,
        max_keepalive_connections=None,
        keepalive_expiry=KEEP_ALIVE_SECONDS,
    )
    if endpoint.startswith("unix:/"):
        uds = endpoint.removeprefix("unix:")
        return httpx.AsyncHTTPTransport(uds=uds, limits=limits), "http://engine"
    url = httpx.URL(endpoint)
    near = url.host in LOOPBACK_HOSTS or with_token
    if url.scheme == "http" and near and url.port is not None:
        return httpx.AsyncHTTPTransport(limits=limits), endpoint.rstrip("/")
    raise ValueError(
        f"rollout.endpoints: {endpoint!r} is neither unix:/path nor http://127.0.0.1:port, and "
        "rollout.token_file is not set. vLLM's weight routes have no authentication of their own: "
        "start the engine with a token, or bring it here through an SSH tunnel or a unix socket"
    )


def bearer(token: str | None) -> dict[str, str]:
    """The header that `token_guard.TokenGuard` asks for."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


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
        transport, base_url = open_transport(endpoint, with_token=token is not None)
        self.label = label
        self._seconds = timeout_seconds
        self._client = httpx.AsyncClient(
            transport=transport,
            base_url=base_url,
            headers=bearer(token),
            trust_env=False,
        )

    def within(self, seconds: float) -> EngineHttp:
        """The same connection, but no answer is waited for longer than this."""
        other = copy(self)
        other._seconds = seconds
        return other

    async def send(
        self, method: str, path: str, body: object = None, *, repeatable: bool = False
    ) -> httpx.Response:
        """One exchange. `repeatable`: also try again when the connection broke half-way.

        Raises:
            EngineUnavailable: the server cannot be reached, or the connection broke.
            EngineError: it answered with an error; EngineFault for 5xx.
        """
        timeout = httpx.Timeout(self._seconds, connect=CONNECT_SECONDS)
        retried: tuple[type[httpx.TransportError], ...] = (httpx.ConnectError,)
        if repeatable:
            retried = (httpx.NetworkError, httpx.RemoteProtocolError)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                answer = await self._client.request(method, path, json=body, timeout=timeout)
            except retried as error:
                failure: httpx.TransportError = error
                logger.warning("%s %s: %r, attempt %d", self.label, path, error, attempt + 1)
                continue
            except httpx.ReadTimeout as error:
                raise EngineUnavailable(
                    f"{self.label} did not answer {method} {path} within {self._seconds:g} s: it "
                    "hangs, or needs longer"
                ) from error
            except httpx.TransportError as error:
                raise EngineUnavailable(
                    f"{self.label} did not answer {method} {path}: {error!r}"
                ) from error
            if answer.is_success:
                return answer
            failed = EngineFault if answer.is_server_error else EngineError
            raise failed(
                f"{self.label} answered {answer.status_code} to {method} {path}: "
                f"{answer.text[:2000]}"
            )
        raise EngineUnavailable(
            f"{self.label} cannot be reached for {method} {path} after {ATTEMPTS} attempts: "
            f"{failure!r}. The engine's log says why"
        ) from failure

    async def status(self, path: str) -> int | None:
        """Of the answer to GET; None: no connection, or it took too long.

        A server closes the connection of an answer that something broke, and may do so only while
        it is used again: a connection that breaks says nothing before a new one does, too.
        """
        for _ in range(2):
            try:
                return (await self._client.get(path, timeout=self._seconds)).status_code
            except (httpx.ConnectError, httpx.TimeoutException):
                return None
            except httpx.TransportError:
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
            return form.model_validate_json(answer.content)
        except pydantic.ValidationError as error:
            raise EngineError(
                f"{self.label} answered {path} in an unknown form: {error}"
            ) from error

    async def close(self) -> None:
        await self._client.aclose()
