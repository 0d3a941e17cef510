"""What the sampler asks of a rollout engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_dapo.config.errors import RunFailed
from megatron_dapo.types import FinishReason, VersionSpans


class EngineError(RunFailed):
    """The engine answered that it cannot do what was asked; asking again would not help."""


class EngineFault(EngineError):
    """The engine answered that something broke inside it (status 5xx)."""


class EngineUnavailable(EngineError):
    """The engine does not answer: it died, hangs or cannot be reached. Another one may serve."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to sample. The same request gives the same tokens on any engine."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    """0 .. 2**63 - 1, of this response alone."""
    temperature: float
    top_p: float
    top_k: int
    """-1: off."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Each ends the response and is its last token. No other token ends it."""
    request_id: str
    """Unique in the run; a repeated attempt keeps it."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Exactly what was sampled, stop token included."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One for each of `token_ids`."""
    finish_reason: FinishReason
    version_spans: VersionSpans
    """Weights that sampled each part of `token_ids`: (first token, version), in order."""
    policy_version: int
    """The oldest of them; without tokens, what the engine serves. 0: what it started with."""


Generate = Callable[[GenerationRequest], Awaitable[GenerationResult]]
"""Samples one response on some engine; EngineUnavailable once none is left."""


class Engine(Protocol):
    """One replica of the policy that samples responses."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample one response.

        Raises:
            EngineUnavailable: the engine does not answer.
            EngineError: it refuses the request, or answered from weights that it should not have.
        """
        ...

    async def interrupt(self) -> None:
        """End all requests of this moment with what they have; finish reason "abort"."""
        ...

    async def close(self) -> None:
        """Release connections. The server behind it is not stopped."""
        ...
