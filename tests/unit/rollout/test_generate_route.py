"""What an engine may answer: anything else is refused before it is stored, graded or trained on."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from megatron_dapo.rollout.engine import EngineError
from megatron_dapo.rollout.generate_route import (
    Choice,
    GenerateResponse,
    check_response,
    version_spans,
)
from megatron_dapo.rollout.weight_update import version_number
from megatron_dapo.types import FinishReason
from tests.unit.rollout.scripted_server import GENERATE, REQUEST, ScriptedServer, talk

VOCABULARY = 100
SHORT = dataclasses.replace(REQUEST, max_tokens=4)


def choice(
    tokens: list[int],
    *,
    logprobs: list[float] | None = None,
    reason: FinishReason = "stop",
    spans: list[tuple[int, str]] | None = None,
) -> Choice:
    numbers = [-0.5] * len(tokens) if logprobs is None else logprobs
    return msgspec.convert(
        {
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": number} for number in numbers]},
            "finish_reason": reason,
            "weight_versions": [{"start": start, "version": name} for start, name in spans or []],
        },
        Choice,
    )


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (choice([7, 2], reason="length"), "finish reason length and stop token 2 at its end"),
        (choice([7, 7, 7, 9], reason="length"), "finish reason length and stop token 9"),
        (choice([7, 7, 7], reason="length"), "length after 3 of 4 tokens.*--max-model-len"),
        (choice([], reason="length"), "length after 0 of 4 tokens"),
        (choice([7, -1, 2]), "token -1, which a vocabulary of 100 does not hold"),
        (choice([7, 100, 2]), "token 100, which a vocabulary"),
        (choice([7, 2**80, 2]), f"token {2**80}, which a vocabulary"),
        (choice([-1], reason="abort"), "token -1, which a vocabulary"),
        (choice([7, 2], logprobs=[-1.0]), "2 tokens and 1 log-probs"),
        (choice([7, 2], logprobs=[]), "2 tokens and 0 log-probs"),
        (choice([7, 2], logprobs=[-1.0] * 3), "2 tokens and 3 log-probs"),
        (choice([7, 2], logprobs=[-1.0, math.nan]), "a log-prob of nan"),
        (choice([7, 2], logprobs=[-math.inf, -1.0]), "a log-prob of -inf"),
        (choice([7, 2], logprobs=[-9999.0, -1.0]), r"a log-prob of -9999.0 \(vLLM writes"),
        (choice([7, 2], logprobs=[-1.0, 0.5]), "a log-prob of 0.5"),
        (choice([7, 2], logprobs=[-1.0, math.inf]), "a log-prob of inf"),
    ],
)
def test_a_response_that_no_engine_of_this_model_gives_is_refused(
    found: Choice, message: str
) -> None:
    with pytest.raises(EngineError, match=f"rollout engine 3 returned a response with.*{message}"):
        check_response("rollout engine 3", SHORT, found, VOCABULARY)


@pytest.mark.parametrize(
    "found",
    [
        choice([7, 2]),
        choice([2]),
        choice([7, 7, 7, 9]),
        choice([7, 7, 7, 7], reason="length"),
        choice([0, 99], reason="abort"),
        choice([], reason="abort"),
        choice([7, 2], reason="abort"),
        choice([7, 2], logprobs=[0.0, 1e-6]),
        choice([7, 2], logprobs=[-104.0, -9000.0]),
    ],
)
def test_whatever_an_engine_may_give_passes(found: Choice) -> None:
    check_response("rollout engine 3", SHORT, found, VOCABULARY)
    check_response("rollout engine 3", SHORT, found, None)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, "4"), (0, "5")], "changed at tokens"),
        ([(0, "4"), (3, "5")], r"changed at tokens \[0, 3\] of 3"),
        ([(-1, "4")], "changed at tokens"),
        ([(0, "5"), (1, "4")], r"versions \[5, 4\]"),
        ([], "does not say which weights"),
    ],
)
def test_spans_that_no_update_leads_to_are_refused(
    spans: list[tuple[int, str]], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        version_spans("rollout engine 3", choice([7, 7, 2], spans=spans), ["4", "5"])


def test_spans_of_an_update_pass() -> None:
    found = choice([7, 7, 2], spans=[(0, "4"), (2, "5")])
    assert version_spans("rollout engine 3", found, ["4", "5"]) == ((0, 4), (2, 5))


@pytest.mark.parametrize("missing", ["logprobs", "token_ids", "finish_reason"])
def test_an_answer_without_a_part_is_refused(missing: str) -> None:
    whole = msgspec.to_builtins(choice([7, 2]))
    with pytest.raises(ValueError, match=missing):
        msgspec.convert({"choices": [whole | {missing: None}]}, GenerateResponse)


@pytest.mark.parametrize(
    ("number", "message"),
    [(-9999.0, "a log-prob of -9999"), (math.nan, "an unknown form: JSON is malformed")],
)
def test_no_wrong_number_of_an_engine_reaches_anyone(
    server: ScriptedServer, number: float, message: str
) -> None:
    server.logprobs = [-1.0, number]
    with pytest.raises(EngineError, match=message):
        talk(server, lambda engine: engine.generate(REQUEST))


@pytest.mark.parametrize("wrong", [True, "7", 7.0, None, [7]])
def test_only_numbers_are_token_ids(wrong: object) -> None:
    whole = msgspec.to_builtins(choice([7, 2]))
    with pytest.raises(ValueError, match="Expected `int`"):
        msgspec.convert({"choices": [whole | {"token_ids": [wrong, 2]}]}, GenerateResponse)


def test_an_answer_of_a_thousand_faults_is_told_in_few_lines(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(_server: ScriptedServer, path: str, body: object) -> object:
        if path != GENERATE:
            return {"weight_version": "default"}
        content = [{"logprob": None}] * 5000
        return {"choices": [{"token_ids": [7] * 5000, "logprobs": {"content": content}}]}

    monkeypatch.setattr(ScriptedServer, "_answer", answer)
    with pytest.raises(EngineError, match="in an unknown form") as caught:
        talk(server, lambda engine: engine.generate(REQUEST))
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("stamp", ["", "-1", "1.5", "four", "9" * 5000, "\u0663"])
def test_a_version_that_no_run_stamps_is_refused(stamp: str) -> None:
    with pytest.raises(EngineError, match=r"weight version .{2,60} is not a number"):
        version_number(stamp)
    assert version_number("12") == 12
