from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_dapo.data import chat_endpoint
from megatron_dapo.data.chat_endpoint import ChatEndpoint, RequestRefused
from megatron_dapo.data.integer_answers import Outcome, audit_path, integer_answers
from megatron_dapo.data.prompt_format import dapo_prompt
from megatron_dapo.data.tokenizer import Message
from tests.unit.data.chat_server import ChatServer, completion, running_server
from tests.unit.data.test_prompts import data_config, write

DICE = "Two fair dice are rolled. What is the probability that the sum of the numbers is {}?"
REPLY = """## Transformation thought process
A fraction.
## Answer format
\\frac{{m}}{{n}}
## Transformed problem
Two fair dice are rolled. The probability that the sum of the numbers is {total} can be written \
as $\\frac{{m}}{{n}}$, where $m$ and $n$ are relatively prime positive integers. Find $m+n$.
## Answer calculation
m = {top}, n = {low}
## Final answer
{sum}"""
SUMS = {7: (1, 6), 4: (1, 12), 9: (1, 9), 10: (1, 12)}


def good_reply(request: str) -> str:
    total = next(total for total in SUMS if f"numbers is {total}?" in request)
    top, low = SUMS[total]
    return REPLY.format(total=total, top=top, low=low, sum=top + low)


class ScriptedModel:
    """Answers by a function of the conversation, and remembers what it was asked."""

    def __init__(self, script: Callable[[Sequence[Message]], str]) -> None:
        self.script = script
        self.asked: list[tuple[Message, ...]] = []
        self.seeds: list[int] = []
        self.running = self.most_running = 0

    async def reply(self, messages: Sequence[Message], *, seed: int) -> str:
        self.asked.append(tuple(messages))
        self.seeds.append(seed)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.001 * (len(self.asked) % 3))
        self.running -= 1
        return self.script(messages)


def last_request(messages: Sequence[Message]) -> str:
    return next(m["content"] for m in reversed(messages) if m["content"].startswith("Problem:"))


def obedient() -> ScriptedModel:
    return ScriptedModel(lambda messages: good_reply(last_request(messages)))


def run(path: Path, out: Path, model: ScriptedModel, **options: int) -> Counter[str]:
    return asyncio.run(integer_answers(path, out, data_config(path), model, **options))


def audit(out: Path) -> list[Outcome]:
    return [Outcome.model_validate_json(line) for line in audit_path(out).read_text().splitlines()]


def dice(*totals: int) -> list[dict[str, str]]:
    return [
        {"prompt": DICE.format(total), "answer": f"\\frac{{{SUMS[total][0]}}}{{{SUMS[total][1]}}}"}
        for total in totals
    ]


def test_rows_are_kept_rewritten_or_rejected_and_each_is_logged(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "1 + 1?", "answer": 2},
        {"prompt": dapo_prompt(DICE.format(7)), "answer": "\\frac{1}{6}"},
        {"prompt": "How large is the angle?", "answer": "336^\\circ"},
        {"prompt": "Where?", "answer": "(1, 2)"},
    )
    out, model = tmp_path / "out.jsonl", obedient()
    counts = run(path, out, model)
    assert counts == {"kept": 2, "rewritten": 1, "rejected: several": 1}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "7", "336"]
    assert rows[1]["prompt"][0]["content"].endswith("Find $m+n$.")
    assert rows[0]["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    log = audit(out)
    assert [entry.line for entry in log] == [1, 2, 3, 4]
    assert (log[1].form, log[1].coefficients) == ("\\frac{m}{n}", (("m", 1), ("n", 6)))
    assert (log[3].status, log[3].reason) == ("rejected", "several")
    assert len(model.asked) == 1


def test_a_wrong_reply_is_told_what_is_wrong_and_tried_again(tmp_path: Path) -> None:
    def script(messages: Sequence[Message]) -> str:
        reply = good_reply(last_request(messages))
        return reply if "derivation" in messages[-1]["content"] else reply.replace("m = 1", "m = 2")

    path, out, model = write(tmp_path, *dice(7)), tmp_path / "out.jsonl", ScriptedModel(script)
    assert run(path, out, model) == {"rewritten": 1}
    (entry,) = audit(out)
    assert [attempt.reason for attempt in entry.attempts] == ["derivation", ""]
    assert len(model.asked[1]) == len(model.asked[0]) + 2
    assert len(set(model.seeds)) == 2


def test_a_row_that_never_passes_is_rejected_with_its_last_reason(tmp_path: Path) -> None:
    def script(messages: Sequence[Message]) -> str:
        request = last_request(messages)
        reply = good_reply(request)
        return reply if "numbers is 7?" in request else reply.replace("Find $m+n$", "Find $m$")

    path, out = write(tmp_path, *dice(7, 4)), tmp_path / "out.jsonl"
    model = ScriptedModel(script)
    assert run(path, out, model, attempts=2) == {"rewritten": 1, "rejected: statement": 1}
    assert [len(entry.attempts) for entry in audit(out)] == [1, 2]
    assert len(out.read_text().splitlines()) == 1


def test_a_refused_request_rejects_its_row_only(tmp_path: Path) -> None:
    def script(messages: Sequence[Message]) -> str:
        request = last_request(messages)
        if "numbers is 4?" in request:
            raise RequestRefused("400: too long")
        return good_reply(request)

    path, out = write(tmp_path, *dice(4, 7)), tmp_path / "out.jsonl"
    counts = run(path, out, ScriptedModel(script))
    assert counts == {"rejected: refused": 1, "rewritten": 1}


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    calls = 0

    def dying(messages: Sequence[Message]) -> str:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the server is gone")
        return good_reply(last_request(messages))

    path, out = write(tmp_path, *dice(7, 4, 9, 10)), tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="gone"):
        run(path, out, ScriptedModel(dying), concurrency=1)
    assert not out.exists()
    assert len(audit(out)) == 2
    with audit_path(out).open("a") as log:
        log.write('{"line": 3, "cut o')
    model = obedient()
    assert run(path, out, model, concurrency=1) == {"rewritten": 4}
    assert len(model.asked) == 2
    assert [entry.line for entry in audit(out)] == [1, 2, 3, 4]
    whole = tmp_path / "whole.jsonl"
    run(path, whole, obedient())
    assert whole.read_text() == out.read_text()


def test_an_audit_log_is_read_again_whatever_characters_its_replies_hold(tmp_path: Path) -> None:
    thought = "a line\u2028a paragraph\u2029next\x85a\x0bä"

    def script(messages: Sequence[Message]) -> str:
        return good_reply(last_request(messages)).replace("A fraction.", thought)

    path, out = write(tmp_path, *dice(7)), tmp_path / "out.jsonl"
    assert run(path, out, ScriptedModel(script)) == {"rewritten": 1}
    out.unlink()
    log = audit_path(out).read_bytes()
    cut_inside_a_letter = log[: log.index("ä".encode()) + 1]
    audit_path(out).write_bytes(log + cut_inside_a_letter)
    model = obedient()
    assert run(path, out, model) == {"rewritten": 1}
    assert not model.asked
    assert audit_path(out).read_bytes() == log


def test_rows_are_under_way_together_and_come_out_in_order(tmp_path: Path) -> None:
    path, out, model = write(tmp_path, *dice(7, 4, 9, 10)), tmp_path / "out.jsonl", obedient()
    run(path, out, model, concurrency=3)
    assert model.most_running == 3
    assert [entry.line for entry in audit(out)] == [1, 2, 3, 4]


def test_nothing_is_overwritten_and_no_empty_file_is_left(tmp_path: Path) -> None:
    path, out = write(tmp_path, {"prompt": "Where?", "answer": "(1, 2)"}), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match="every row was rejected"):
        run(path, out, obedient())
    assert not out.exists()
    out.touch()
    with pytest.raises(ValueError, match="nothing is overwritten"):
        run(path, out, obedient())
    with pytest.raises(ValueError, match="both must be 1 or more"):
        run(path, tmp_path / "other.jsonl", obedient(), attempts=0)
    audit_path(tmp_path / "third.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="no audit log"):
        run(path, tmp_path / "third.jsonl", obedient())


def test_raw_answers_of_deepmath_are_sorted_without_a_fault(
    shared_data: Path, tmp_path: Path
) -> None:
    path, out = shared_data / "deepmath_raw_500.jsonl", tmp_path / "out.jsonl"
    config = data_config(path, answer_column="ground_truth")
    model = ScriptedModel(lambda messages: "no headings")
    counts = asyncio.run(integer_answers(path, out, config, model, attempts=1))
    assert counts.total() == len(audit(out))
    assert counts["kept"] == 197
    assert counts["rejected: sections"] == len(model.asked) > 100


def test_an_audit_log_holds_line_ends_of_any_kind_and_may_end_inside_a_letter(
    tmp_path: Path,
) -> None:
    """Pages write U+2028 and U+0085; a killed process leaves half of a letter."""
    rows = dice(7, 4)
    rows[0]["prompt"] = rows[0]["prompt"].replace("rolled. ", "rolled.\u2028\u0085 ")
    path, out = write(tmp_path, *rows), tmp_path / "out.jsonl"
    run(path, out, obedient())
    whole = audit_path(out).read_bytes()
    audit_path(out).write_bytes(whole + '{"line": 3, "problem": "\u221a'.encode()[:-1])
    first = out.read_bytes()
    out.unlink()
    model = obedient()
    assert run(path, out, model) == {"rewritten": 2}
    assert model.asked == []
    assert (out.read_bytes(), audit_path(out).read_bytes()) == (first, whole)


def test_rows_that_the_server_refused_are_asked_again_by_the_next_call(tmp_path: Path) -> None:
    def refusing(messages: Sequence[Message]) -> str:
        raise RequestRefused("400: max_tokens is too large")

    path, out = write(tmp_path, *dice(7, 4)), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match="every row was rejected"):
        run(path, out, ScriptedModel(refusing))
    assert run(path, out, obedient()) == {"rewritten": 2}
    assert [entry.status for entry in audit(out)] == ["rejected"] * 2 + ["rewritten"] * 2
    out.unlink()
    model = obedient()
    assert run(path, out, model) == {"rewritten": 2}
    assert model.asked == []


def test_a_row_that_the_server_always_fails_over_is_rejected_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_endpoint, "FIRST_BACKOFF_SECONDS", 0.001)
    path, out = write(tmp_path, *dice(7, 4, 9)), tmp_path / "out.jsonl"
    broken = True

    def answer(last: str) -> tuple[int, object]:
        if broken and "numbers is 4?" in last:
            return 500, {"error": "an assertion failed"}
        return 200, completion(good_reply(last) if last.startswith("Problem:") else "yes")

    async def rewrite(server: ChatServer) -> Counter[str]:
        async with ChatEndpoint(server.url) as model:
            return await integer_answers(path, out, data_config(path), model)

    with running_server() as server:
        server.answer = answer
        counts = asyncio.run(rewrite(server))
        assert counts == {"rewritten": 2, "rejected: server_error": 1}
        (rejected,) = [entry for entry in audit(out) if entry.status == "rejected"]
        assert (rejected.line, rejected.reason) == (2, "server_error")
        assert "500: " in rejected.detail and "an assertion failed" in rejected.detail
        out.unlink()
        broken = False  # the next call asks again for what the server failed over
        server.got.clear()
        assert asyncio.run(rewrite(server)) == {"rewritten": 3}
        assert len(server.got) == 1
