"""vLLM's /inference/v1/generate: what is sent there, and what of the answer is read."""

from __future__ import annotations

from collections.abc import Sequence

import pydantic

from megatron_dapo.rollout.engine import EngineError, GenerationRequest
from megatron_dapo.rollout.server_options import SERVED_NAME
from megatron_dapo.rollout.weight_update import version_number
from megatron_dapo.types import FinishReason, VersionSpans

GENERATE = "/inference/v1/generate"
ENGINE_ID_PREFIX = "generate-tokens-"
"""What the route puts before a request_id to name it inside the engine."""


class _TokenLogprob(pydantic.BaseModel):
    logprob: float


class _Logprobs(pydantic.BaseModel):
    content: list[_TokenLogprob]


class _VersionSpan(pydantic.BaseModel):
    version: str
    start: int


class Choice(pydantic.BaseModel):
    """One response."""

    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: FinishReason
    weight_versions: list[_VersionSpan] | None


class GenerateResponse(pydantic.BaseModel):
    """The part that we read of the answer of /inference/v1/generate."""

    choices: list[Choice] = pydantic.Field(min_length=1, max_length=1)


def request_body(request: GenerationRequest) -> dict[str, object]:
    """The route's body for one response: token ids in, token ids and log-probs out."""
    return {
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


def check_tokens(label: str, request: GenerationRequest, choice: Choice) -> None:
    """Refuse a response that the request cannot have led to: it would be trained on.

    Args:
        label: of the engine, for messages.

    Raises:
        EngineError: too many tokens, a stop token before the end, or a stop without one.
    """
    tokens, stops = choice.token_ids, request.stop_token_ids
    if len(tokens) > request.max_tokens:
        wrong = f"{len(tokens)} tokens, {request.max_tokens} were asked for at most"
    elif early := [token for token in tokens[:-1] if token in stops]:
        wrong = f"stop token {early[0]} before its end"
    elif choice.finish_reason == "stop" and (not tokens or tokens[-1] not in stops):
        wrong = f"finish reason stop and none of the stop tokens {stops} at its end"
    else:
        return
    raise EngineError(
        f"{label} returned a response with {wrong}: does a proxy or another program answer there? "
        "Restart the engine"
    )


def version_spans(label: str, choice: Choice, allowed: Sequence[str]) -> VersionSpans:
    """Whose weights sampled which tokens.

    Args:
        label: of the engine, for messages.
        allowed: stamps of the weights that may have.

    Raises:
        EngineError: others have, or what it says makes no sense.
    """
    spans = choice.weight_versions or []
    if choice.token_ids and not spans:
        raise EngineError(f"{label} does not say which weights its tokens come from")
    starts = [span.start for span in spans]
    if starts and (starts[0] != 0 or starts != sorted(starts)):
        raise EngineError(
            f"{label} says that its weights changed at tokens {starts}: the first must be 0, and "
            "none lie before the one in front of it; restart the engine"
        )
    foreign = [span.version for span in spans if span.version not in allowed]
    if foreign:
        raise EngineError(
            f"{label} answered from weight version {foreign[0]!r}, this run installed "
            f"{' and '.join(allowed)}: the engine was restarted, or someone else changed its "
            "weights; restart it"
        )
    return tuple((span.start, version_number(span.version)) for span in spans)
