"""Client of one vLLM server: token ids in, token ids and log-probs out, and whose weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from pydantic import JsonValue

from megatron_dapo.rollout.abort import ABORT_LIMIT_SECONDS, abort
from megatron_dapo.rollout.engine import (
    EngineError,
    EngineFault,
    EngineUnavailable,
    GenerationRequest,
    GenerationResult,
)
from megatron_dapo.rollout.engine_http import EngineHttp
from megatron_dapo.rollout.generate_route import (
    GENERATE,
    GenerateResponse,
    check_response,
    request_body,
    version_spans,
)
from megatron_dapo.rollout.health import DEATH_SECONDS, falls_silent
from megatron_dapo.rollout.weight_update import (
    INITIAL_VERSION,
    Digests,
    InFlight,
    deliver_weights,
    load_weights,
    resume,
    served_stamp,
    stamp_weights,
    verify_weights,
    version_number,
)

logger = logging.getLogger(__name__)


class VllmEngine:
    """`Engine` over HTTP. Create and use it inside one event loop.

    It generates only from weights that it installed itself: an engine that has none yet, was
    restarted, or was changed by someone else, is an error and not an answer. An update is
    `load`, `verify`, `release`, `let_requests_in`; requests that come meanwhile wait for its end.
    Once one of the first three fails, every later call and every request that still runs ends in
    an `EngineError`.

    Args:
        endpoint: unix:/path or http://127.0.0.1:port.
        label: what messages call it; default: the endpoint.
        request_timeout_seconds: longest wait for one answer.
        update_timeout_seconds: longest wait for one step of an update, and for a probe. Where
            running requests have to end first, that wait is as long as for them.
        sleep_mode: the server was started with --enable-sleep-mode; without it `sleep` and
            `wake_up` do nothing (CPU, or the engine has its own devices).
        in_flight: requests that run when an update comes finish on the old weights ("wait"), or
            go on with the new ones and carry both versions ("keep").
        token: that the server asks for; None: it listens on a unix socket or loopback alone.
        vocabulary: of the model: no other token ids are taken. None: it is not known.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        label: str = "",
        request_timeout_seconds: float = 3600.0,
        update_timeout_seconds: float = 600.0,
        sleep_mode: bool = False,
        in_flight: InFlight = "wait",
        token: str | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.label = label or endpoint
        self.sleep_mode = sleep_mode
        self.in_flight = in_flight
        self._vocabulary = vocabulary
        self.http = EngineHttp(
            endpoint, label=self.label, timeout_seconds=request_timeout_seconds, token=token
        )
        """For questions that are neither requests nor updates."""
        self._steps = self.http.within(update_timeout_seconds)
        self._update_seconds = update_timeout_seconds
        self._init_info: Mapping[str, object] | None = None
        self._installed: list[str] = []
        """Stamps of the weights that this client brought in, the current one last."""
        self._running: set[asyncio.Task[GenerateResponse]] = set()
        """Requests and probes that were sent and not answered yet."""
        self._interruptible: dict[asyncio.Task[GenerateResponse], str] = {}
        """Of those the requests, with their request_id."""
        self._waiting: set[asyncio.Future[Literal[True]]] = set()
        """Of requests that an update keeps from being sent."""
        self._in_proof: int | None = None
        """Version that the engine goes on with, and that requests are not let in for yet."""
        self._serving = asyncio.Event()
        self._serving.set()
        self._failure: EngineError | None = None
        self._stepping: set[asyncio.Task[object]] = set()
        """Steps of an update that run."""
        self.gone = asyncio.Event()
        """Set once it is lost: another client has to take its place."""
        self.lost_requests = 0
        """That had been sent when it was lost."""

    @property
    def usable(self) -> bool:
        """False: every call ends in an error."""
        return self._failure is None

    @property
    def lost(self) -> bool:
        """It does not answer; False when it answers but is not to be used."""
        return isinstance(self._failure, EngineUnavailable)

    @property
    def why_unusable(self) -> str:
        """In words; "" while it is usable."""
        return "" if self._failure is None else str(self._failure)

    @property
    def has_weights(self) -> bool:
        """This client has brought weights in."""
        return bool(self._installed)

    @property
    def updating(self) -> bool:
        """Between `load` and `let_requests_in`."""
        return not self._serving.is_set()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample one response; the same request may be sent again after a lost connection.

        Nothing that new weights sampled is returned before `let_requests_in`, not even the end of
        a response that older ones began (in_flight "keep").

        Raises:
            EngineError: also when tokens come from weights that this client did not install, or
                from older ones than it was serving when the request was sent.
        """
        if not await self._may_start():
            return self._nothing()
        result = await self._sample(request, interruptible=True)
        newest = result.version_spans[-1][1] if result.version_spans else result.policy_version
        if newest == self._in_proof:
            await self._serving.wait()
            self._check_usable()
        return result

    async def probe(self, request: GenerationRequest) -> GenerationResult:
        """As `generate`, but between `release` and `let_requests_in` too: to try new weights."""
        return await self._sample(request, interruptible=False)

    async def interrupt(self) -> None:
        """Every request of this moment ends now, with the tokens that it has and finish reason
        "abort"; those that wait for an update end without tokens. Later ones run as ever.

        Tokens, log-probs and version spans of an interrupted response are whole: it can go on as
        a request whose prompt is the old one and its tokens. Updates and probes are left alone:
        vLLM's /pause?mode=abort would end those too, and hold back what comes meanwhile.

        Raises:
            EngineUnavailable: it did not end them in time, and is lost.
            EngineError: the engine does not take it.
        """
        for waiting in self._waiting:
            waiting.cancel()
        seconds = ABORT_LIMIT_SECONDS + self.updating * self._update_seconds
        try:
            await abort(self.http, self._interruptible, seconds)
        except EngineUnavailable as error:
            self.lose(str(error))
            raise

    async def load(self, init_info: Mapping[str, object], payload: Mapping[str, object]) -> None:
        """First step of an update: pause and bring the new weights in.

        Args:
            init_info: of /init_weight_transfer_engine; told once, and again when it changes.
            payload: of /update_weights; empty: `deliver` brings all weights.
        """
        self._check_usable()
        if not self._serving.is_set():
            raise RuntimeError(f"{self.label} is already being updated; finish that first")
        self._serving.clear()
        told = None if init_info == self._init_info else init_info
        async with self._step("loading"):
            pausing = self.http if self._running else self._steps
            await load_weights(self._steps, told, payload, self.in_flight, pausing=pausing)
        self._init_info = dict(init_info)

    async def deliver(self, payload: Mapping[str, object]) -> None:
        """More of the weights, after `load` and before `verify`."""
        self._check_updating()
        async with self._step("loading"):
            await deliver_weights(self._steps, payload)

    async def verify(self, expected: Sequence[Digests] | None) -> list[dict[str, JsonValue]]:
        """Second step: the engine finishes, and its digests must be the `expected` ones.

        Returns:
            Report of each tensor-parallel rank; [] without digests.
        """
        self._check_updating()
        async with self._step("verifying"):
            return await verify_weights(self._steps, expected)

    async def release(self, policy_version: int) -> None:
        """Third step: old caches go, the version is stamped, the engine has its cache and goes on.

        New requests still wait, but for `probe`. Those that stood still inside the engine go on,
        and their answers wait.
        """
        self._check_updating()
        async with self._step("releasing"):
            await stamp_weights(self._steps, policy_version, self.in_flight)
            # Installed before it goes on: answers may come before this returns.
            self._installed.append(str(policy_version))
            self._in_proof = policy_version
            await self.wake_up("kv_cache")  # with this a sleeping engine already goes on
            await resume(self._steps)

    def let_requests_in(self) -> None:
        """Last step, once the caller trusts the weights: requests and answers go on."""
        self._check_updating()
        self._in_proof = None
        self._serving.set()

    async def update(
        self,
        init_info: Mapping[str, object],
        payload: Mapping[str, object],
        policy_version: int,
        expected: Sequence[Digests] | None = None,
    ) -> list[dict[str, JsonValue]]:
        """A whole update of this engine alone; returns what `verify` does."""
        await self.load(init_info, payload)
        reports = await self.verify(expected)
        await self.release(policy_version)
        self.let_requests_in()
        return reports

    async def adopt(self) -> int:
        """Take the weights that the engine serves now for installed; returns their version.

        For tools that sample from a server as it is. A run never does this.
        """
        self._installed = [await served_stamp(self.http)]
        return version_number(self._installed[0])

    def give_up(self, reason: str) -> None:
        """Never use this engine again, and end the requests that still wait for it.

        Called when its update cannot be completed: it stays paused, so they would never end.
        """
        self._end(EngineError(f"{self.label} is not used any more: {reason}; restart the engine"))

    def lose(self, reason: str) -> None:
        """It does not answer any more: whatever waits for it ends in EngineUnavailable."""
        self._end(EngineUnavailable(f"{self.label} is lost: {reason}"))

    def _end(self, failure: EngineError) -> None:
        lost = isinstance(failure, EngineUnavailable)
        if self._failure is None or (lost and not self.lost):
            self._failure = failure
        self._serving.set()
        if lost:
            self.gone.set()
        for task in self._running | (self._stepping - {asyncio.current_task()}):
            task.cancel()

    async def weight_version(self) -> int:
        """Version of the weights that the engine serves; 0: those it started with."""
        return version_number(await served_stamp(self.http))

    async def sleep(self) -> None:
        """Free the device: weights and cache are dropped. The next weights must be a full set."""
        if self.sleep_mode:
            await self.http.send("POST", "/sleep?level=2&mode=wait")

    async def wake_up(self, *tags: str) -> None:
        """Take device memory again. "weights" before, "kv_cache" after the weight update, so that
        the cache is not there yet while the weights arrive."""
        if self.sleep_mode:
            await self._steps.send("POST", "/wake_up?" + "&".join(f"tags={tag}" for tag in tags))

    async def close(self) -> None:
        await self.http.close()

    async def _may_start(self) -> bool:
        """Wait until requests are let in; False: the request was interrupted before that."""
        if self._serving.is_set():
            return True
        waiting = asyncio.ensure_future(self._serving.wait())
        self._waiting.add(waiting)
        try:
            await asyncio.wait([waiting])
            return not waiting.cancelled()
        finally:
            self._waiting.discard(waiting)
            waiting.cancel()

    def _nothing(self) -> GenerationResult:
        """Result of a request that was interrupted before it was sent."""
        version = version_number(self._installed[-1] if self._installed else INITIAL_VERSION)
        return GenerationResult((), (), "abort", (), version)

    async def _sample(self, request: GenerationRequest, *, interruptible: bool) -> GenerationResult:
        self._check_usable()
        if not self._installed:
            raise EngineError(
                f"{self.label} has no weights of this run yet; update it before the first request"
            )
        current = len(self._installed) - 1
        try:
            choice = (await self._generate(request, interruptible)).choices[0]
        except EngineUnavailable:
            self.lost_requests += interruptible
            raise
        check_response(self.label, request, choice, self._vocabulary)
        allowed = self._installed[current:]
        spans = version_spans(self.label, choice, allowed)
        versions = [version for _, version in spans] or [version_number(allowed[-1])]
        return GenerationResult(
            token_ids=tuple(choice.token_ids),
            logprobs=tuple(entry.logprob for entry in choice.logprobs.content),
            finish_reason=choice.finish_reason,
            version_spans=spans,
            policy_version=min(versions),
        )

    async def _generate(self, request: GenerationRequest, interruptible: bool) -> GenerateResponse:
        body = request_body(request)
        http = self.http if interruptible else self._steps  # a probe is a step of an update
        task = asyncio.ensure_future(
            http.ask(GenerateResponse, "POST", GENERATE, body, repeatable=True)
        )
        self._running.add(task)
        if interruptible:
            self._interruptible[task] = request.request_id
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            self._check_usable()
            raise
        except (EngineFault, EngineUnavailable) as error:
            self.lose(str(error))
            raise EngineUnavailable(str(error)) from error
        finally:
            self._running.discard(task)
            self._interruptible.pop(task, None)

    @asynccontextmanager
    async def _step(self, name: str) -> AsyncIterator[None]:
        """A step of an update: whatever ends it early ends the engine's use."""
        task = asyncio.current_task()
        assert task is not None, "steps run in tasks"
        self._stepping.add(task)
        done = False
        try:
            yield
            done = True
        except asyncio.CancelledError:
            if self._failure is None or task.uncancel() > 0:
                raise
            self._check_usable()
        except EngineUnavailable as error:
            self.lose(str(error))
            raise
        except EngineFault as error:
            if await falls_silent(self.http.within(DEATH_SECONDS).status):
                self.lose(str(error))
                raise EngineUnavailable(str(error)) from error
            raise
        finally:
            self._stepping.discard(task)
            if not done:
                self.give_up(f"its weight update failed while {name}, it may hold half of it")

    def _check_updating(self) -> None:
        self._check_usable()
        assert not self._serving.is_set(), f"{self.label} is not being updated"

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
