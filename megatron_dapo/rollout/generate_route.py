"""vLLM's /inference/v1/generate: what is sent there, and what of the answer is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from megatron_dapo.rollout.engine import EngineError, GenerationRequest
from megatron_dapo.rollout.server_options import SERVED_NAME
from megatron_dapo.rollout.weight_update import version_number
from megatron_dapo.types import FinishReason, VersionSpans

GENERATE = "/inference/v1/generate"
LEAST_LOGPROB = -9999.0
"""What the route writes for NaN, and for a token that it has no log-prob of."""
MOST_LOGPROB = 0.01
"""Above 0 by no more than rounding."""
ENGINE_ID_PREFIX = "generate-tokens-"
"""What the route puts before a request_id to name it inside the engine."""


class _TokenLogprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _VersionSpan(msgspec.Struct):
    version: str
    start: int


class Choice(msgspec.Struct):
    """One response."""

    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: FinishReason
    weight_versions: list[_VersionSpan] | None


class GenerateResponse(msgspec.Struct):
    """The part that we read of the answer of /inference/v1/generate: 100 bytes for each token."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1, max_length=1)]


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


def check_response(
    label: str, request: GenerationRequest, choice: Choice, vocabulary: int | None
) -> None:
    """Refuse a response that the request cannot have led to: it would be trained on.

    Args:
        label: of the engine, for messages.
        vocabulary: of the model; None: not known.

    Raises:
        EngineError: too many tokens, a stop token before the end, a token of no vocabulary, another
            finish reason than its tokens have, or log-probs that are none.
    """
    wrong = _wrong_end(request, choice) or _wrong_numbers(choice, vocabulary)
    if wrong:
        raise EngineError(
            f"{label} returned a response with {wrong}: does a proxy or another program answer "
            "there? Restart the engine"
        )


def _wrong_end(request: GenerationRequest, choice: Choice) -> str:
    """What is wrong with where a response ends; empty where nothing is."""
    tokens, stops, reason = choice.token_ids, request.stop_token_ids, choice.finish_reason
    stopped = bool(tokens) and tokens[-1] in stops
    if len(tokens) > request.max_tokens:
        return f"{len(tokens)} tokens, {request.max_tokens} were asked for at most"
    if early := [token for token in tokens[:-1] if token in stops]:
        return f"stop token {early[0]} before its end"
    if reason == "stop" and not stopped:
        return f"finish reason stop and none of the stop tokens {stops} at its end"
    if reason == "length" and stopped:
        return f"finish reason length and stop token {tokens[-1]} at its end"
    if reason == "length" and len(tokens) < request.max_tokens:
        return (
            f"finish reason length after {len(tokens)} of {request.max_tokens} tokens: a prompt of "
            f"{len(request.prompt_token_ids)} and those must fit into --max-model-len of the engine"
        )
    return ""


def _wrong_numbers(choice: Choice, vocabulary: int | None) -> str:
    """What is wrong with the numbers of a response; empty where nothing is."""
    tokens = choice.token_ids
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    if len(logprobs) != len(tokens):
        return f"{len(tokens)} tokens and {len(logprobs)} log-probs"
    ids = math.inf if vocabulary is None else vocabulary
    if foreign := [token for token in tokens if not 0 <= token < ids]:
        return f"token {foreign[0]}, which a vocabulary of {ids} does not hold"
    if broken := [x for x in logprobs if not LEAST_LOGPROB < x <= MOST_LOGPROB]:
        return f"a log-prob of {broken[0]} (vLLM writes {LEAST_LOGPROB:g} for NaN)"
    return ""


def version_spans(label: str, choice: Choice, allowed: Sequence[str]) -> VersionSpans:
    """Whose weights sampled which tokens.

    Args:
        label: of the engine, for messages.
        allowed: stamps of the weights that may have.

    Raises:
        EngineError: others have, or what it says makes no sense.
    """
    spans, tokens = choice.weight_versions or [], len(choice.token_ids)
    if tokens and not spans:
        raise EngineError(f"{label} does not say which weights its tokens come from")
    starts = [span.start for span in spans]
    if starts and (starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= tokens):
        raise EngineError(
            f"{label} says that its weights changed at tokens {starts} of {tokens}: the first must "
            "be 0, and each lie behind the one in front of it; restart the engine"
        )
    foreign = [span.version for span in spans if span.version not in allowed]
    if foreign:
        raise EngineError(
            f"{label} answered from weight version {foreign[0]!r}, this run installed "
            f"{' and '.join(allowed)}: the engine was restarted, or someone else changed its "
            "weights; restart it"
        )
    versions = [version_number(span.version) for span in spans]
    if versions != sorted(versions):
        raise EngineError(
            f"{label} says that weights of versions {versions} sampled a response one after "
            "another: they never go back; restart the engine"
        )
    return tuple(zip(starts, versions, strict=True))
