"""Problems with any exact answer -> problems with an integer answer (DAPO 3.5, appendix A).

The answer is parsed, its form and the integer are computed here, and a language model only words
the new question. Every reply is checked; what became of each row goes into an audit log.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import pydantic

from megatron_dapo.config.schema import DataConfig
from megatron_dapo.data.answer_parser import AnswerError, parse_answer
from megatron_dapo.data.chat_endpoint import FAILED, REFUSED, ChatModel, RequestRefused
from megatron_dapo.data.exact_sum import ExactSum
from megatron_dapo.data.integer_form import IntegerForm, integer_form, letters_of
from megatron_dapo.data.prompt_format import bare_problem
from megatron_dapo.data.rewrite_check import RewriteError, check_rewrite
from megatron_dapo.data.rewrite_prompt import correction, rewrite_messages
from megatron_dapo.data.row_files import check_new_file, dapo_row, write_rows
from megatron_dapo.data.rows import Row
from megatron_dapo.data.selection import usable_rows

logger = logging.getLogger(__name__)
AUDIT_SUFFIX = ".audit.jsonl"
ASKED_AGAIN = (REFUSED, FAILED)
"""Reasons of rows whose request got no reply. That may lie in the options of a call, or in the
server, so the next call asks again."""
Status = Literal["kept", "rewritten", "rejected"]


class Attempt(pydantic.BaseModel):
    """One reply of the model, and why it was not used; an empty reason: it was."""

    reply: str
    reason: str = ""
    detail: str = ""


class Outcome(pydantic.BaseModel):
    """What became of one row; a line of the audit log."""

    line: int
    digest: str
    """Of problem and answer: the row that this line is about."""
    status: Status
    reason: str = ""
    """Why it was rejected: of `AnswerError`, of the last `RewriteError` or `RequestRefused`."""
    detail: str = ""
    problem: str
    answer: str
    form: str = ""
    coefficients: tuple[tuple[str, int], ...] = ()
    new_problem: str = ""
    integer: str = ""
    """The new answer; of a kept row the old one without its unit."""
    attempts: tuple[Attempt, ...] = ()


def audit_path(out: Path) -> Path:
    """Where the audit log of an output lies."""
    return out.with_name(out.name + AUDIT_SUFFIX)


def check_options(out: Path, *, attempts: int, concurrency: int) -> None:
    """Refuse what `integer_answers` cannot do, before a file is read or a server is asked.

    Raises:
        ValueError: `out` cannot be written, or a number is below 1.
    """
    check_new_file(out)
    if attempts < 1 or concurrency < 1:
        raise ValueError(f"attempts={attempts}, concurrency={concurrency}: both must be 1 or more")


async def integer_answers(
    path: Path,
    out: Path,
    config: DataConfig,
    model: ChatModel,
    *,
    attempts: int = 3,
    concurrency: int = 64,
    seed: int = 0,
) -> Counter[str]:
    """Rewrite a prompt file into `out`; returns the number of rows by status and reason.

    Rows whose answer is an integer (with or without a unit) are kept as they are; the others are
    rewritten or rejected. The audit log `audit_path(out)` has one line a row and is written as
    rows finish: after an interruption, the same call goes on where it stopped.

    Args:
        path: .parquet or .jsonl.
        out: .parquet or .jsonl in DAPO-Math-17k's format; must not exist.
        config: columns, and what happens to bad and repeated rows.
        model: words the new questions.
        attempts: replies that are asked for one row; each is told what was wrong before.
        concurrency: rows that are under way at once.
        seed: of the sampling; differs from attempt to attempt.

    Raises:
        ValueError: a run with `config` would refuse the file, `out` cannot be written, or no row
            is left.
        RuntimeError: the model is gone.
    """
    check_options(out, attempts=attempts, concurrency=concurrency)
    rows = [item.row for item in usable_rows(path, config).rows]
    audit = audit_path(out)
    outcomes = await _logged(
        rows, audit, model, attempts=attempts, concurrency=concurrency, seed=seed
    )
    written = [
        dapo_row(
            row,
            source=path.stem,
            answer=outcome.integer,
            problem=outcome.new_problem or None,
        )
        for row, outcome in zip(rows, outcomes, strict=True)
        if outcome.status != "rejected"
    ]
    if not written:
        raise ValueError(f"{path}: every row was rejected; {audit} says why")
    write_rows(out, written)
    return Counter(
        f"{outcome.status}: {outcome.reason}" if outcome.reason else outcome.status
        for outcome in outcomes
    )


async def _logged(
    rows: Sequence[Row],
    audit: Path,
    model: ChatModel,
    *,
    attempts: int,
    concurrency: int,
    seed: int,
) -> list[Outcome]:
    """The outcome of every row, in order; those that the audit log has not go into it."""
    done = _read_audit(audit)
    outcomes: list[Outcome] = []
    with audit.open("a", encoding="utf-8") as log:
        async for outcome in rewrite_rows(
            rows, model, attempts=attempts, concurrency=concurrency, seed=seed, done=done
        ):
            outcomes.append(outcome)
            if outcome.digest not in done:
                log.write(outcome.model_dump_json() + "\n")
                log.flush()
    return outcomes


async def rewrite_rows(
    rows: Iterable[Row],
    model: ChatModel,
    *,
    attempts: int,
    concurrency: int,
    seed: int,
    done: Mapping[str, Outcome],
) -> AsyncIterator[Outcome]:
    """The outcome of every row, in the rows' order, `concurrency` of them under way at once."""
    under_way: deque[asyncio.Task[Outcome]] = deque()
    try:
        for row in rows:
            if len(under_way) == concurrency:
                yield await under_way.popleft()
            under_way.append(asyncio.create_task(_rewrite(row, model, attempts, seed, done)))
        while under_way:
            yield await under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _rewrite(
    row: Row, model: ChatModel, attempts: int, seed: int, done: Mapping[str, Outcome]
) -> Outcome:
    problem = bare_problem("\n\n".join(turn["content"] for turn in row.messages))
    digest = hashlib.sha256(json.dumps([row.line, problem, row.answer]).encode()).hexdigest()[:16]
    if digest in done:
        return done[digest]
    base = Outcome(
        line=row.line, digest=digest, status="rejected", problem=problem, answer=row.answer
    )
    if len(row.messages) != 1:
        return base.model_copy(update={"reason": "conversation", "detail": "several messages"})
    try:
        parsed = parse_answer(row.answer)
        if (whole := parsed.value.as_integer) is not None:
            return base.model_copy(update={"status": "kept", "integer": str(whole)})
        form = integer_form(parsed.value, letters_of(problem))
    except AnswerError as error:
        return base.model_copy(update={"reason": error.reason, "detail": error.detail})
    return base.model_copy(update=await _ask(base, parsed.value, form, model, attempts, seed))


async def _ask(
    row: Outcome,
    value: ExactSum,
    form: IntegerForm,
    model: ChatModel,
    attempts: int,
    seed: int,
) -> dict[str, object]:
    """What changes of a row's outcome once the model has had its attempts."""
    messages = rewrite_messages(row.problem, row.answer, form)
    tried: list[Attempt] = []
    for attempt in range(attempts):
        try:
            reply = await model.reply(messages, seed=_seed(seed, row.digest, attempt))
            rewrite = check_rewrite(row.problem, value, form, reply)
        except RequestRefused as error:
            tried.append(Attempt(reply="", reason=error.reason, detail=str(error)))
            break
        except RewriteError as error:
            tried.append(Attempt(reply=reply, reason=error.reason, detail=error.detail))
            messages = [*messages, *correction(reply, error)]
            continue
        return {
            "status": "rewritten",
            "form": rewrite.form,
            "coefficients": rewrite.coefficients,
            "new_problem": rewrite.problem,
            "integer": str(rewrite.integer),
            "attempts": (*tried, Attempt(reply=reply)),
        }
    last = tried[-1]
    return {
        "reason": last.reason,
        "detail": last.detail,
        "form": form.template,
        "attempts": tuple(tried),
    }


def _seed(seed: int, digest: str, attempt: int) -> int:
    """Different for every row and attempt, the same in every run."""
    text = f"{seed}/{digest}/{attempt}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


def _read_audit(path: Path) -> dict[str, Outcome]:
    """Rows that an earlier call finished; a last line that was cut off is not one of them."""
    if not path.is_file():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    try:  # lines of bytes: text may hold separators of lines that are none here
        outcomes = [Outcome.model_validate_json(line) for line in whole.splitlines()]
    except pydantic.ValidationError as error:
        raise ValueError(f"{path} is no audit log ({error}); move it away") from error
    if outcomes:
        logger.info("%s: %d rows were done before", path, len(outcomes))
    return {outcome.digest: outcome for outcome in outcomes if outcome.reason not in ASKED_AGAIN}
