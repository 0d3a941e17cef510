"""Responses that were interrupted: what they have, and how they go on as if they had not been.

A response goes on as a request whose prompt is the old prompt and its tokens so far. Its pieces are
joined exactly: tokens, one log-prob each, and which weights sampled which of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_dapo.rollout.engine import GenerationRequest, GenerationResult
from megatron_dapo.types import FinishReason, VersionSpans


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The beginning of a response; at least one token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: VersionSpans
    pieces: int
    """Requests that it took so far."""

    @property
    def oldest_version(self) -> int:
        return min(version for _, version in self.version_spans)


def next_request(
    first: GenerationRequest, begun: Unfinished | None, seed: int
) -> GenerationRequest:
    """The request that goes on with a response; `first` itself where nothing has begun.

    Args:
        first: the request that the response began with.
        seed: for what is still to come; not read without `begun`.
    """
    if begun is None:
        return first
    return dataclasses.replace(
        first,
        prompt_token_ids=first.prompt_token_ids + begun.token_ids,
        max_tokens=first.max_tokens - len(begun.token_ids),
        seed=seed,
        request_id=f"{first.request_id}-{begun.pieces}",
    )


def joined(
    first: GenerationRequest, begun: Unfinished | None, result: GenerationResult
) -> GenerationResult:
    """What was sampled before and now, as one result.

    A response that was interrupted after its last token is not unfinished: its finish reason is
    what the engine would have said next.
    """
    token_ids, logprobs, spans = result.token_ids, result.logprobs, result.version_spans
    if begun is not None:
        shift = len(begun.token_ids)
        later = [(start + shift, version) for start, version in spans]
        if later and later[0][1] == begun.version_spans[-1][1]:
            later = later[1:]
        token_ids = begun.token_ids + token_ids
        logprobs = begun.logprobs + logprobs
        spans = (*begun.version_spans, *later)
    return GenerationResult(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=_finish_reason(first, token_ids, result.finish_reason),
        version_spans=spans,
        policy_version=min((version for _, version in spans), default=result.policy_version),
    )


def unfinished(whole: GenerationResult, begun: Unfinished | None) -> Unfinished | None:
    """What goes on later; None where not one token is there yet."""
    if not whole.token_ids:
        return None
    more = begun is None or len(whole.token_ids) > len(begun.token_ids)
    pieces = (0 if begun is None else begun.pieces) + more
    return Unfinished(whole.token_ids, whole.logprobs, whole.version_spans, pieces)


def _finish_reason(
    first: GenerationRequest, token_ids: tuple[int, ...], reason: FinishReason
) -> FinishReason:
    if reason != "abort" or not token_ids:
        return reason
    if token_ids[-1] in first.stop_token_ids:
        return "stop"
    return "length" if len(token_ids) >= first.max_tokens else "abort"
