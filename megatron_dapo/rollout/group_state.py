"""Groups and unfinished responses as JSON, exact to the bit, and checked when they come back."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Literal, TypedDict

import numpy as np
import pydantic
from pydantic import BaseModel, ConfigDict, JsonValue

from megatron_dapo.rollout.continuation import Unfinished
from megatron_dapo.rollout.draft import Draft, Member
from megatron_dapo.types import FinishReason, Prompt, Response, Reward

DTypes = Mapping[int, np.dtype]
TOKEN: DTypes = {4: np.dtype("<i4"), 8: np.dtype("<i8")}
LOGPROB: DTypes = {4: np.dtype("<f4"), 8: np.dtype("<f8")}
"""By the bytes of a number. Engines compute log-probs in 32 bits; what does not fit into those,
to the bit, is saved in 64."""
Bytes = Literal[4, 8]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Prompt(_Strict):
    id: str
    text: str
    token_ids: list[int]
    answer: str
    source: str


class _Reward(_Strict):
    accuracy: float | None
    score: float
    overlong: float
    parts: dict[str, float]
    extracted: str | None


class _Member(_Strict):
    """A response: complete with `reward`, else what it has so far; no tokens: not begun."""

    tokens: str
    logprobs: str
    token_bytes: Bytes = 8
    """Of a number in `tokens`, as in the first format, which did not say so."""
    logprob_bytes: Bytes = 8
    spans: list[tuple[int, int]]
    pieces: int = 0
    finish_reason: FinishReason | None = None
    policy_version: int | None = None
    seed: int | None = None
    text: str = ""
    reward: _Reward | None = None


class _Draft(_Strict):
    step: int
    event: int
    version: int
    prompt: _Prompt
    members: list[_Member]


class DraftStateError(RuntimeError):
    """Saved groups cannot be gone on with; the message says why."""


def drafts_to_json(drafts: Iterable[Draft]) -> list[JsonValue]:
    """Everything that `drafts_from_json` needs."""
    return [
        _Draft(
            step=draft.step,
            event=draft.event,
            version=draft.version,
            prompt=_Prompt.model_validate(
                asdict(draft.prompt) | {"token_ids": [*draft.prompt.token_ids]}
            ),
            members=[_member_state(member) for member in draft.members],
        ).model_dump(mode="json")
        for draft in drafts
    ]


def drafts_from_json(state: JsonValue, group_size: int) -> list[Draft]:
    """The drafts that were saved; a complete one has its group again.

    Raises:
        DraftStateError: the state is not what `drafts_to_json` writes, or its groups have another
            size than rollout.group_size.
    """
    if not isinstance(state, list):
        raise DraftStateError(f"saved groups: must be a list, not {type(state).__name__}")
    return [_draft(index, item, group_size) for index, item in enumerate(state)]


def _member_state(member: Member) -> _Member:
    response, reward = member.response, member.reward
    if response is None or reward is None:
        begun = member.begun or Unfinished((), (), (), 0)
        return _Member(
            **packed_numbers(begun.token_ids, begun.logprobs),
            spans=[*begun.version_spans],
            pieces=begun.pieces,
        )
    return _Member(
        **packed_numbers(response.token_ids, response.rollout_logprobs),
        spans=[*response.version_spans],
        finish_reason=response.finish_reason,
        policy_version=response.policy_version,
        seed=response.seed,
        text=response.text,
        reward=_Reward.model_validate(asdict(reward) | {"parts": dict(reward.parts)}),
    )


def _draft(index: int, item: JsonValue, group_size: int) -> Draft:
    try:
        saved = _Draft.model_validate_json(pydantic.TypeAdapter(JsonValue).dump_json(item))
        if len(saved.members) != group_size:
            raise ValueError(
                f"it has {len(saved.members)} responses and rollout.group_size={group_size}: "
                "resume with the same group size, or start a new run"
            )
        prompt = saved.prompt.model_dump() | {"token_ids": tuple(saved.prompt.token_ids)}
        draft = Draft(Prompt(**prompt), saved.step, saved.event, saved.version, ())
        draft.members = tuple(
            _member(draft.prompt, number, member) for number, member in enumerate(saved.members)
        )
    except (ValueError, RuntimeError) as error:
        raise DraftStateError(f"saved group {index} cannot be used: {error}") from error
    draft.close_when_complete()
    return draft


def _member(prompt: Prompt, index: int, saved: _Member) -> Member:
    tokens = tuple(_unpack(saved.tokens, TOKEN[saved.token_bytes]))
    logprobs = tuple(_unpack(saved.logprobs, LOGPROB[saved.logprob_bytes]))
    starts = [start for start, _ in saved.spans]
    if len(tokens) != len(logprobs):
        raise ValueError(f"response {index}: {len(tokens)} tokens but {len(logprobs)} log-probs")
    first = [0] if starts else []
    if starts != sorted(set(starts)) or starts[:1] != first or (tokens and not starts):
        raise ValueError(f"response {index}: spans {saved.spans} of {len(tokens)} tokens")
    spans = tuple((start, version) for start, version in saved.spans)
    if saved.reward is None:
        if not tokens:
            return Member(index)
        return Member(index, begun=Unfinished(tokens, logprobs, spans, saved.pieces))
    if saved.finish_reason is None or saved.policy_version is None or saved.seed is None:
        raise ValueError(f"response {index}: finish reason, version or seed is missing")
    response = Response(
        prompt_id=prompt.id,
        sample_index=index,
        token_ids=tokens,
        rollout_logprobs=logprobs,
        finish_reason=saved.finish_reason,
        policy_version=saved.policy_version,
        seed=saved.seed,
        text=saved.text,
        version_spans=spans,
    )
    return Member(index, response=response, reward=Reward(**saved.reward.model_dump()))


class PackedNumbers(TypedDict):
    """Token ids and log-probs of one response, as text."""

    tokens: str
    logprobs: str
    token_bytes: Bytes
    logprob_bytes: Bytes


def packed_numbers(token_ids: Sequence[int], logprobs: Sequence[float]) -> PackedNumbers:
    """In as few bytes as hold them exactly."""
    tokens, token_bytes = _pack(token_ids, TOKEN)
    packed, logprob_bytes = _pack(logprobs, LOGPROB)
    return PackedNumbers(
        tokens=tokens, logprobs=packed, token_bytes=token_bytes, logprob_bytes=logprob_bytes
    )


def unpacked_numbers(packed: PackedNumbers) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The token ids and log-probs that were packed.

    Raises:
        ValueError: the text is not what `packed_numbers` writes.
    """
    return (
        tuple(_unpack(packed["tokens"], TOKEN[packed["token_bytes"]])),
        tuple(_unpack(packed["logprobs"], LOGPROB[packed["logprob_bytes"]])),
    )


def _pack(values: Sequence[float], dtypes: DTypes) -> tuple[str, Bytes]:
    """In as few bytes as hold them exactly, and how many that are for each."""
    exact = np.asarray(values, dtype=dtypes[8])
    with np.errstate(over="ignore"):
        short = exact.astype(dtypes[4])
    fits = np.array_equal(short, exact)
    text = base64.b64encode((short if fits else exact).tobytes()).decode("ascii")
    return text, 4 if fits else 8


def _unpack(text: str, dtype: np.dtype) -> list:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype).tolist()
    except binascii.Error as error:
        raise ValueError(f"{error} in packed numbers") from error
