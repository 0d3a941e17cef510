"""Groups and unfinished responses go through JSON unchanged; what is damaged is refused."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.rollout.continuation import Unfinished
from megatron_dapo.rollout.draft import Draft
from megatron_dapo.rollout.group_state import DraftStateError, drafts_from_json, drafts_to_json
from megatron_dapo.rollout.keep_rate import KeepRate
from megatron_dapo.rollout.scheduler_state import (
    SchedulerState,
    state_from_json,
    state_to_json,
    usable_state,
)
from megatron_dapo.types import Prompt, Response, Reward

logprobs = st.floats(max_value=0.0, min_value=-1e6, allow_nan=False)
tokens = st.lists(st.tuples(st.integers(0, 2**31 - 1), logprobs), min_size=1, max_size=5)


def response(index: int, pairs: list[tuple[int, float]], version: int) -> Response:
    ids, values = zip(*pairs, strict=True)
    spans = ((0, version), (1, version + 1)) if len(ids) > 1 else ((0, version),)
    return Response("p", index, ids, values, "stop", version, 2**63 - 1, "text \u2028", spans)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Of two members each: complete, begun or not begun."""
    prompt = Prompt("p", "1 + 1 = \N{GRINNING FACE}", (3, 4), "2", "s")
    draft = Draft.new(prompt, draw(st.integers(1, 9)), draw(st.integers(0, 9)), 0, 2)
    for member in draft.members:
        kind = draw(st.sampled_from(["complete", "begun", "new"]))
        pairs = draw(tokens)
        whole = response(member.index, pairs, draw(st.integers(0, 3)))
        if kind == "complete":
            accuracy = draw(st.sampled_from([0.0, 1.0, None]))
            member.response = whole
            member.reward = Reward(accuracy, 0.1, -1 / 3, {"a": math.pi}, "2")
        elif kind == "begun":
            member.begun = Unfinished(
                whole.token_ids, whole.rollout_logprobs, whole.version_spans, 3
            )
    draft.close_when_complete()
    return draft


def told(draft: Draft) -> tuple[object, ...]:
    members = [(m.index, m.begun, m.response, m.reward) for m in draft.members]
    return (draft.prompt, draft.step, draft.event, draft.version, members, draft.group)


@pytest.mark.parametrize("token", [0, 2**31 - 1, 2**31, 2**62])
@pytest.mark.parametrize("logprob", [0.0, -0.1, -1e300])
def test_numbers_of_any_size_come_back(token: int, logprob: float) -> None:
    draft = begun()
    draft.members[0].begun = Unfinished((token,), (logprob,), ((0, 4),), 1)
    state = json.loads(json.dumps(drafts_to_json([draft])))
    assert [told(again) for again in drafts_from_json(state, 2)] == [told(draft)]


@settings(deadline=None)
@given(st.lists(drafts(), max_size=3))
def test_drafts_come_back_to_the_bit(saved: list[Draft]) -> None:
    state = json.loads(json.dumps(drafts_to_json(saved)))
    assert [told(draft) for draft in drafts_from_json(state, 2)] == [told(d) for d in saved]


def complete() -> Draft:
    draft = Draft.new(Prompt("p", "", (3,), "2"), 1, 0, 0, 2)
    for member in draft.members:
        member.response = response(member.index, [(5, -0.5), (2, -1.5)], 4)
        member.reward = Reward(float(member.index), 1.0)
    draft.close_when_complete()
    return draft


def begun() -> Draft:
    draft = Draft.new(Prompt("p", "", (3,), "2"), 1, 1, 0, 2)
    draft.members[0].begun = Unfinished((7, 8), (-1.0, -2.0), ((0, 4),), 1)
    return draft


def in_member(key: str, value: object) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        state["ready"][0]["members"][1][key] = value

    return change


def drop_member(state: Any) -> None:
    state["ready"][0]["members"].pop()


def swap(state: Any) -> None:
    state["ready"], state["unfinished"] = state["unfinished"], state["ready"]


def set_top(key: str, value: object) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        state[key] = value

    return change


DAMAGE: dict[str, tuple[Callable[[Any], None], str]] = {
    "a log-prob short": (in_member("logprobs", "AAAAvw=="), "2 tokens but 1 log-probs"),
    "no base64": (in_member("tokens", "%%%"), "packed numbers"),
    "cut bytes": (in_member("tokens", "AAAA"), "buffer size"),
    "infinite log-prob": (in_member("logprobs", "AACAfwAAgH8="), "log-prob of inf"),
    "other widths": (in_member("token_bytes", 8), "1 tokens but 2 log-probs"),
    "no width": (in_member("logprob_bytes", 2), "logprob_bytes"),
    "spans of nowhere": (in_member("spans", [[1, 4]]), "spans"),
    "no seed": (in_member("seed", None), "finish reason, version or seed is missing"),
    "unknown key": (in_member("colour", "red"), "colour"),
    "another group size": (drop_member, r"1 responses and rollout\.group_size=2"),
    "complete as unfinished": (swap, "an incomplete group as complete"),
    "another format": (set_top("format", 3), "format"),
    "a rate of nothing": (set_top("keep_rate", 0.0), "keep_rate"),
    "no list": (set_top("ready", {}), "ready"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_state_is_refused_with_the_reason(what: str) -> None:
    change, reason = DAMAGE[what]
    state = SchedulerState(KeepRate(0.5, 3), [complete()], [begun()], None)
    saved = json.loads(json.dumps(state_to_json(state)))
    assert state_from_json(saved, 2).rate == state.rate
    change(saved)
    with pytest.raises(DraftStateError, match=reason):
        state_from_json(saved, 2)


def test_a_state_of_the_first_format_comes_back() -> None:
    state = SchedulerState(KeepRate(0.5, 3), [complete()], [begun()], None)
    saved = json.loads(json.dumps(state_to_json(state)))
    saved["format"] = 1
    for draft in saved["ready"] + saved["unfinished"]:
        for member in draft["members"]:
            for key, width, short, wide in (
                ("tokens", "token_bytes", "<i4", "<i8"),
                ("logprobs", "logprob_bytes", "<f4", "<f8"),
            ):
                assert member.pop(width) == 4
                values = np.frombuffer(base64.b64decode(member[key]), dtype=short)
                member[key] = base64.b64encode(values.astype(wide).tobytes()).decode()
    found = state_from_json(saved, 2)
    assert [told(draft) for draft in found.ready] == [told(complete())]
    assert [told(draft) for draft in found.unfinished] == [told(begun())]


@pytest.mark.parametrize(("logprob", "most"), [(-0.1, 17), (float(np.float32(-0.1)), 11)])
def test_numbers_take_no_more_bytes_than_they_need(logprob: float, most: int) -> None:
    """Base64 of 4 bytes a token id, and of 4 for a log-prob that an engine computed in 32 bits."""
    draft = Draft.new(Prompt("p", "", (3,), "2"), 1, 1, 0, 2)
    count = 3000
    draft.members[0].begun = Unfinished((7,) * count, (logprob,) * count, ((0, 4),), 1)
    text = json.dumps(drafts_to_json([draft]))
    assert len(text) < most * count
    (again,) = drafts_from_json(json.loads(text), 2)
    assert again.members[0].begun == draft.members[0].begun


def test_a_copy_does_not_change_with_what_is_sampled_later() -> None:
    draft = begun()
    copy = draft.copy()
    draft.members[0].begun = None
    draft.members[1].reward = Reward(1.0, 1.0)
    assert copy.members[0].begun == Unfinished((7, 8), (-1.0, -2.0), ((0, 4),), 1)
    assert not copy.members[1].complete


def test_the_oldest_version_is_never_newer_than_it_is_known_to_be() -> None:
    draft = Draft.new(Prompt("p", "", (3,), "2"), 1, 1, 6, 2)
    assert draft.oldest_version == 6
    draft.members[0].begun = Unfinished((7, 8), (-1.0, -2.0), ((0, 5), (1, 7)), 1)
    assert draft.oldest_version == 5
    assert complete().oldest_version == 4


def test_an_unfinished_response_needs_room_for_one_more_token() -> None:
    """No engine takes a request for no tokens."""
    state = state_to_json(SchedulerState(KeepRate(), [], [begun()], None))
    sampling = SamplingConfig(surplus="carry", unfinished="continue")
    tokens = len(begun().members[0].begun.token_ids)  # type: ignore[union-attr]
    usable_state(state, RolloutConfig(group_size=2, max_response_tokens=tokens + 1), sampling)
    with pytest.raises(DraftStateError, match=f"Resume with at least {tokens + 1},"):
        usable_state(state, RolloutConfig(group_size=2, max_response_tokens=tokens), sampling)
