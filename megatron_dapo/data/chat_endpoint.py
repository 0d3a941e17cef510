"""A language model behind an OpenAI-compatible server, such as vLLM's, on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import httpx
import pydantic

from megatron_dapo.config.endpoint_checks import LOOPBACK_HOSTS

if TYPE_CHECKING:
    from megatron_dapo.data.tokenizer import Message

AnswerT = TypeVar("AnswerT", bound=pydantic.BaseModel)
ATTEMPTS = 5
FIRST_BACKOFF_SECONDS = 0.5
CONNECT_SECONDS = 10.0
EVERY_REQUEST = httpx.Limits(max_connections=None)
"""How many are under way is the caller's to say: one in a queue here would run out of time."""
REFUSED, FAILED = "refused", "server_error"
"""Why a request has no reply: the server does not take it, because it is too long for example; or
fails over it each time, while it answers others."""


class RequestRefused(Exception):
    """This one request gets no reply; `reason` is REFUSED or FAILED."""

    def __init__(self, detail: str, reason: str = REFUSED) -> None:
        super().__init__(detail)
        self.reason = reason


class NoAnswer(RuntimeError):
    """No usable answer, `problem` in short: no connection, 5xx, or what is no completion."""

    def __init__(self, told: str, problem: str) -> None:
        super().__init__(told)
        self.problem = problem


class ChatModel(Protocol):
    """What rewrites: a conversation in, one reply out."""

    async def reply(self, messages: Sequence[Message], *, seed: int) -> str:
        """Text of the next turn.

        Raises:
            RequestRefused: this request has no reply; others may be sent.
            RuntimeError: the server is gone, or answers nothing as it should.
        """


class _Turn(pydantic.BaseModel):
    content: str | None


class _Choice(pydantic.BaseModel):
    message: _Turn


class _Completion(pydantic.BaseModel):
    choices: list[_Choice] = pydantic.Field(min_length=1)


class _Model(pydantic.BaseModel):
    id: str


class _Models(pydantic.BaseModel):
    data: list[_Model] = pydantic.Field(min_length=1)


class ChatEndpoint:
    """`ChatModel` over HTTP. Create and use it inside one event loop, as a context.

    Args:
        endpoint: unix:/path or http://127.0.0.1:port.
        model: served name; default: the server's first.
        remote: allow an address on another machine. Problems and answers are sent there.
        api_key_variable: environment variable with the key, where the server wants one.
        temperature: of the sampling.
        max_tokens: longest reply.
        timeout_seconds: longest wait for one reply.

    Raises:
        ValueError: another kind of address, one on another machine without `remote`, or a
            variable that is not set.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        model: str | None = None,
        remote: bool = False,
        api_key_variable: str | None = None,
        temperature: float = 0.7,
        max_tokens: int = 4096,
        timeout_seconds: float = 600.0,
    ) -> None:
        transport, base_url = _address(endpoint, remote)
        headers = {}
        if api_key_variable is not None:
            if api_key_variable not in os.environ:
                raise ValueError(
                    f"environment variable {api_key_variable} is not set; export the server's key "
                    "in it, or name no variable where the server wants no key"
                )
            headers["Authorization"] = f"Bearer {os.environ[api_key_variable]}"
        self._endpoint = endpoint
        self._model = model
        self._sampling = {"temperature": temperature, "max_tokens": max_tokens}
        timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
        self._http = httpx.AsyncClient(
            transport=transport,
            base_url=base_url,
            headers=headers,
            timeout=timeout,
            trust_env=False,
        )

    async def __aenter__(self) -> ChatEndpoint:
        if self._model is None:
            answer = await self._send("GET", "/v1/models", None)
            self._model = self._read(_Models, answer).data[0].id
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def reply(self, messages: Sequence[Message], *, seed: int) -> str:
        assert self._model is not None, "used outside its context"
        body = {
            "model": self._model,
            "messages": [dict(message) for message in messages],
            "seed": seed,
            **self._sampling,
        }
        try:
            return await self._complete(body)
        except NoAnswer:
            await self._require_alive()
        try:
            return await self._complete(body, attempts=1)
        except NoAnswer as error:
            raise RequestRefused(error.problem, FAILED) from error

    async def _require_alive(self) -> None:
        """Ask the shortest question: is it that request, or the server?

        Raises:
            RuntimeError: it does not answer this one either.
        """
        question = [{"role": "user", "content": "Say yes."}]
        try:
            await self._complete(
                {"model": self._model, "messages": question, "max_tokens": 1}, attempts=1
            )
        except RequestRefused:
            return  # an answer, too

    async def _complete(self, body: Mapping[str, object], *, attempts: int = ATTEMPTS) -> str:
        answer = await self._send("POST", "/v1/chat/completions", body, attempts)
        return self._read(_Completion, answer).choices[0].message.content or ""

    async def _send(
        self, method: str, path: str, body: object, attempts: int = ATTEMPTS
    ) -> httpx.Response:
        problem, status = "", 0
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                answer = await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                problem, status = str(error) or type(error).__name__, 0
                continue
            status = answer.status_code
            if status in (400, 413, 422) and body is not None:
                raise RequestRefused(f"{status}: {answer.text[:200]}")
            if status < 400:
                return answer
            problem = f"{status}: {answer.text[:200]}"
            if status < 500 and status != 429:
                break
        told = (
            f"{self._endpoint}{path} does not answer ({problem}); see that the server runs, then "
            "start the same command again: rows that are done are not sent twice"
        )
        if 400 <= status < 500:  # of this client, not of the request
            raise RuntimeError(told)
        raise NoAnswer(told, problem)

    def _read(self, kind: type[AnswerT], answer: httpx.Response) -> AnswerT:
        try:
            return kind.model_validate_json(answer.content)
        except pydantic.ValidationError as error:
            told = f"{self._endpoint} is no OpenAI-compatible server: {error}"
            raise NoAnswer(told, f"no completion: {str(error)[:200]}") from error


def _address(endpoint: str, remote: bool) -> tuple[httpx.AsyncHTTPTransport, str]:
    if endpoint.startswith("unix:/"):
        return (
            httpx.AsyncHTTPTransport(uds=endpoint.removeprefix("unix:"), limits=EVERY_REQUEST),
            "http://model",
        )
    url = httpx.URL(endpoint)
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"ENDPOINT={endpoint} must be unix:/path or http://127.0.0.1:port")
    if url.host not in LOOPBACK_HOSTS and not remote:
        raise ValueError(
            f"ENDPOINT={endpoint} is on another machine: problems and answers would be sent there. "
            "Give --remote if that is meant"
        )
    base_url = endpoint.rstrip("/").removesuffix("/v1")
    return httpx.AsyncHTTPTransport(limits=EVERY_REQUEST), base_url
