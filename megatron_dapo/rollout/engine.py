"""What the sampler asks of a rollout engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron_dapo.types import FinishReason


class EngineError(RuntimeError):
    """The engine answered that it cannot do what was asked; asking again would not help."""


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
    policy_version: int
    """Weights that the first token was sampled from; 0: those the engine started with."""


class Engine(Protocol):
    """One replica of the policy that samples responses."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample one response.

        Raises:
            EngineUnavailable: the engine does not answer.
            EngineError: it refuses the request.
        """
        ...

    async def update_weights(self, payload: Mapping[str, object], policy_version: int) -> None:
        """Load published weights; afterwards every token comes from them alone.

        Raises:
            EngineError: the update failed; the engine must not generate any more.
        """
        ...

    async def close(self) -> None:
        """Release connections. The server behind it is not stopped."""
        ...
