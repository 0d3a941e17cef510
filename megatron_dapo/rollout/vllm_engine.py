"""Client of one vLLM server: token ids in, token ids and log-probs out, weights by file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import httpx
import pydantic

from megatron_dapo.rollout.engine import (
    EngineError,
    EngineUnavailable,
    GenerationRequest,
    GenerationResult,
)
from megatron_dapo.rollout.server_options import SERVED_NAME
from megatron_dapo.types import FinishReason

logger = logging.getLogger(__name__)

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]", "::1")
ATTEMPTS = 5
FIRST_BACKOFF_SECONDS = 0.2
CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 2.0
"""Idle connections are given up before the server (after 5 s) closes them under a request."""
INITIAL_VERSION = "default"
"""What vLLM calls the weights that it started with."""


AnswerT = TypeVar("AnswerT", bound=pydantic.BaseModel)


class _TokenLogprob(pydantic.BaseModel):
    logprob: float


class _Logprobs(pydantic.BaseModel):
    content: list[_TokenLogprob]


class _VersionSpan(pydantic.BaseModel):
    version: str


class _Choice(pydantic.BaseModel):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: FinishReason
    weight_versions: list[_VersionSpan] | None


class _GenerateResponse(pydantic.BaseModel):
    """The part that we read of the answer of /inference/v1/generate."""

    choices: list[_Choice] = pydantic.Field(min_length=1, max_length=1)


class _WeightInfo(pydantic.BaseModel):
    weight_version: str


class _ResetAnswer(pydantic.BaseModel):
    success: bool


def open_transport(endpoint: str) -> tuple[httpx.AsyncBaseTransport, str]:
    """Transport and base URL of `unix:/path` or `http://127.0.0.1:port`.

    Raises:
        ValueError: any other address. vLLM's control routes have no authentication, so an engine
            that can be reached from another machine could be given other weights by anyone.
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
    if url.scheme == "http" and url.host in LOOPBACK_HOSTS and url.port is not None:
        return httpx.AsyncHTTPTransport(limits=limits), endpoint.rstrip("/")
    raise ValueError(
        f"rollout.endpoints: {endpoint!r} is neither unix:/path nor http://127.0.0.1:port. vLLM's "
        "weight routes have no authentication; bring a remote engine to this machine through an "
        "SSH tunnel or a shared unix socket"
    )


class VllmEngine:
    """`Engine` over HTTP. Create and use it inside one event loop.

    Args:
        endpoint: unix:/path or http://127.0.0.1:port.
        label: what messages call it; default: the endpoint.
        request_timeout_seconds: longest wait for one answer.
        sleep_mode: the server was started with --enable-sleep-mode; without it `sleep` and
            `wake_up` do nothing (CPU, or the engine has its own devices).
    """

    def __init__(
        self,
        endpoint: str,
        *,
        label: str = "",
        request_timeout_seconds: float = 3600.0,
        sleep_mode: bool = False,
    ) -> None:
        transport, base_url = open_transport(endpoint)
        self.endpoint = endpoint
        self.label = label or endpoint
        self.sleep_mode = sleep_mode
        self._client = httpx.AsyncClient(
            transport=transport,
            base_url=base_url,
            timeout=httpx.Timeout(request_timeout_seconds, connect=CONNECT_SECONDS),
            trust_env=False,
        )
        self._in_flight = 0
        self._weights_directory: Path | None = None
        self._broken = False

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample one response; the same request may be sent again after a lost connection."""
        self._check_usable()
        body = {
            "request_id": request.request_id,
            "model": SERVED_NAME,
            "token_ids": request.prompt_token_ids,
            "sampling_params": {
                "seed": request.seed,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "max_tokens": request.max_tokens,
                "stop_token_ids": request.stop_token_ids,
                "ignore_eos": True,  # only `stop_token_ids` count, not the model folder's
                "logprobs": 0,  # of the sampled token, no alternatives
                "detokenize": False,
            },
        }
        self._in_flight += 1
        try:
            answer = await self._send("POST", "/inference/v1/generate", body, repeatable=True)
        finally:
            self._in_flight -= 1
        choice = self._parse(_GenerateResponse, answer).choices[0]
        return GenerationResult(
            token_ids=tuple(choice.token_ids),
            logprobs=tuple(entry.logprob for entry in choice.logprobs.content),
            finish_reason=choice.finish_reason,
            policy_version=self._first_version(choice),
        )

    async def update_weights(self, payload: Mapping[str, object], policy_version: int) -> None:
        """Replace the weights: pause, load, finish, forget cached prompts, stamp, resume.

        The directory of the first payload is the only one that the engine ever reads from.

        Raises:
            RuntimeError: requests of this client are still running.
            EngineError: a step failed. Half of the weights may be new, so the engine refuses
                every later call; the run has to stop.
        """
        self._check_usable()
        if self._in_flight:
            raise RuntimeError(
                f"weight update of {self.label} while {self._in_flight} of its requests are "
                "running; wait for the whole rollout first"
            )
        if self._weights_directory is None:
            await self._allow_directory(Path(str(payload["path"])).parent)
        self._broken = True
        await self._send("POST", "/pause?mode=wait&clear_cache=false")
        await self._send("POST", "/start_weight_update")
        await self._send("POST", "/update_weights", {"update_info": dict(payload)})
        await self._send("POST", "/finish_weight_update", {"weight_version": None})
        await self._reset_prefix_cache()
        await self._send("POST", "/update_weight_version", {"new_version": str(policy_version)})
        found = await self.weight_version()
        if found != policy_version:
            raise EngineError(
                f"{self.label} serves weight version {found} after the update to version "
                f"{policy_version}; is another run using this engine?"
            )
        await self._send("POST", "/resume")
        self._broken = False

    async def weight_version(self) -> int:
        """Version of the weights that the engine serves; 0: those it started with."""
        answer = await self._send("GET", "/weight_info", repeatable=True)
        return _version_number(self._parse(_WeightInfo, answer).weight_version)

    async def sleep(self) -> None:
        """Free the device: weights and cache are dropped. The next weights must be a full set."""
        if self.sleep_mode:
            await self._send("POST", "/sleep?level=2&mode=wait")

    async def wake_up(self, *tags: str) -> None:
        """Take device memory again. "weights" before, "kv_cache" after the weight update, so that
        the cache is not there yet while the weights arrive."""
        if self.sleep_mode:
            await self._send("POST", "/wake_up?" + "&".join(f"tags={tag}" for tag in tags))

    async def close(self) -> None:
        await self._client.aclose()

    async def _allow_directory(self, directory: Path) -> None:
        init_info = {"directory": str(directory)}
        await self._send("POST", "/init_weight_transfer_engine", {"init_info": init_info})
        self._weights_directory = directory

    async def _reset_prefix_cache(self) -> None:
        """Keys and values of the old weights must not meet the new ones."""
        answer = await self._send("POST", "/reset_prefix_cache")
        if not self._parse(_ResetAnswer, answer).success:
            raise EngineError(
                f"{self.label} could not reset its prefix cache after a weight update: "
                "requests of someone else still hold blocks of it"
            )

    async def _send(
        self, method: str, path: str, body: object = None, *, repeatable: bool = False
    ) -> httpx.Response:
        """One exchange. `repeatable`: also try again when the connection broke half-way."""
        retried: tuple[type[httpx.TransportError], ...] = (httpx.ConnectError,)
        if repeatable:
            retried = (httpx.NetworkError, httpx.RemoteProtocolError)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                answer = await self._client.request(method, path, json=body)
            except retried as error:
                failure: httpx.TransportError = error
                logger.warning("%s %s: %r, attempt %d", self.label, path, error, attempt + 1)
                continue
            except httpx.TransportError as error:
                raise EngineUnavailable(
                    f"{self.label} did not answer {method} {path}: {error!r}"
                ) from error
            if answer.is_success:
                return answer
            raise EngineError(
                f"{self.label} answered {answer.status_code} to {method} {path}: "
                f"{answer.text[:2000]}"
            )
        raise EngineUnavailable(
            f"{self.label} cannot be reached for {method} {path} after {ATTEMPTS} attempts: "
            f"{failure!r}. The engine's log says why"
        ) from failure

    def _parse(self, model: type[AnswerT], answer: httpx.Response) -> AnswerT:
        try:
            return model.model_validate_json(answer.content)
        except pydantic.ValidationError as error:
            raise EngineError(
                f"{self.label} answered {answer.url.path} in an unknown form: {error}"
            ) from error

    def _first_version(self, choice: _Choice) -> int:
        return _version_number(choice.weight_versions[0].version) if choice.weight_versions else 0

    def _check_usable(self) -> None:
        if self._broken:
            raise EngineError(
                f"{self.label}: an earlier weight update failed or is running, its weights may "
                "be half old; restart the engine"
            )


def _version_number(version: str) -> int:
    if version == INITIAL_VERSION:
        return 0
    if not version.isdecimal():
        raise EngineError(f"weight version {version!r} is not a number; set by someone else?")
    return int(version)
