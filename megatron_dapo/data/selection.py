"""Which rows of a prompt file are trained on, and an account of every row that is not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.config.schema import DataConfig
from megatron_dapo.data.answer_parser import AnswerError, parse_answer
from megatron_dapo.data.exact_sum import ExactSum
from megatron_dapo.data.prompt_format import format_prompt
from megatron_dapo.data.question_key import question_key
from megatron_dapo.data.rows import BadRow, Row, read_rows

if TYPE_CHECKING:
    from megatron_dapo.data.tokenizer import Tokenizer

_LISTED = 5
"""Lines that a message names; the report holds them all."""


@dataclass(frozen=True)
class Contradiction:
    """Rows that ask the same and do not have the same answer."""

    lines_by_answer: tuple[tuple[str, tuple[int, ...]], ...]
    """(answer, its lines), by first line."""

    @property
    def lines(self) -> tuple[int, ...]:
        """Every line that is part of it, ascending."""
        return tuple(sorted(line for _, lines in self.lines_by_answer for line in lines))


@dataclass(frozen=True)
class PromptReport:
    """What became of the rows of a prompt file. Lines count from 1."""

    path: Path
    rows: int
    kept: int
    max_prompt_tokens: int
    bad: tuple[BadRow, ...]
    duplicate_lines: tuple[tuple[int, ...], ...]
    """Lines with the same prompt text, first line first."""
    contradictions: tuple[Contradiction, ...]
    """Rows whose prompts say the same up to case, blanks and punctuation."""
    deduplicated: bool
    """True: of `duplicate_lines` only the first was kept."""
    overlong_lines: tuple[int, ...] | None
    """More than `max_prompt_tokens`; None without a tokenizer."""
    overlong_dropped: bool
    """False: cut on the left to the limit."""
    text_answer_lines: tuple[int, ...]
    """Kept, but the answer is no integer: it will be compared as text or as a rational."""

    @property
    def copies(self) -> int:
        """Rows that repeat an earlier prompt."""
        return sum(len(lines) - 1 for lines in self.duplicate_lines)

    @property
    def unique_prompts(self) -> int:
        """Different prompt texts among the rows that can be read."""
        return self.rows - len(self.bad) - self.copies

    @property
    def conflicting_lines(self) -> tuple[tuple[int, ...], ...]:
        """Of each contradiction the first line of every answer."""
        return tuple(
            tuple(lines[0] for _, lines in found.lines_by_answer) for found in self.contradictions
        )

    @property
    def bad_counts(self) -> dict[str, int]:
        """Rows that cannot be used, by reason."""
        return dict(sorted(Counter(bad.reason for bad in self.bad).items()))

    def summary(self) -> str:
        """One line for the log."""
        fate = "dropped" if self.overlong_dropped else "cut on the left"
        parts = [f"{self.path}: {self.kept} prompts of {self.rows} rows"]
        if self.bad:
            parts.append(f"{len(self.bad)} bad rows ({listed(self.bad)})")
        if self.copies:
            verb = "dropped" if self.deduplicated else "kept"
            parts.append(f"{self.copies} copies {verb} ({len(self.duplicate_lines)} prompts)")
        for what, lines in (
            (f"over {self.max_prompt_tokens} tokens {fate}", self.overlong_lines),
            ("with an answer that is no integer", self.text_answer_lines),
        ):
            if lines:
                parts.append(f"{len(lines)} {what} (lines {listed(lines)})")
        if conflicts := self.conflicting_lines:
            groups = listed([f"({', '.join(map(str, lines))})" for lines in conflicts])
            parts.append(f"{len(conflicts)} with different answers (lines {groups})")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class SelectedRow:
    """A row as it is trained on; without a tokenizer it has neither text nor ids."""

    row: Row
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Selection:
    """Rows of a file in its order, and the account of all of them."""

    rows: tuple[SelectedRow, ...]
    report: PromptReport

    def refusals(self, config: DataConfig) -> tuple[str, ...]:
        """Why a run that reads this file with `config` would stop before it starts."""
        report = self.report
        found = []
        if report.bad and config.bad_rows == "error":
            found.append(
                f"{report.path}: {len(report.bad)} of {report.rows} rows cannot be read: "
                f"{listed(report.bad)}. Mend them, or set data.bad_rows=skip to go on without them"
            )
        if report.overlong_lines and config.overlong_prompts == "error":
            found.append(
                f"{report.path}: {len(report.overlong_lines)} prompts have more than "
                f"data.max_prompt_tokens={report.max_prompt_tokens} tokens "
                f"(lines {listed(report.overlong_lines)}). Raise the limit, or set "
                "data.overlong_prompts=drop"
            )
        if not self.rows and not found:
            found.append(f"no prompt is left; {report.summary()}")
        return tuple(found)


def listed(items: Sequence[object]) -> str:
    """The first few of `items`, for a message."""
    more = ", ..." if len(items) > _LISTED else ""
    return ", ".join(str(item) for item in items[:_LISTED]) + more


def select_rows(path: Path, config: DataConfig, tokenizer: Tokenizer | None = None) -> Selection:
    """Read, check and de-duplicate a prompt file; with a tokenizer also format and measure it.

    Raises:
        ValueError: the file cannot be opened as what its name says, or a row does not fit
            `data.prompt_format`.
    """
    rows: list[Row] = []
    bad: list[BadRow] = []
    for row in read_rows(
        path, prompt_column=config.prompt_column, answer_column=config.answer_column
    ):
        if isinstance(row, Row):
            rows.append(row)
        else:
            bad.append(row)
    copies = _same_prompt(rows)
    repeated = {line for lines in copies for line in lines[1:]} if config.deduplicate else set()
    wanted = [row for row in rows if row.line not in repeated]
    kept, overlong = [SelectedRow(row, "", ()) for row in wanted], None
    if tokenizer is not None:
        kept, overlong = _tokenise(wanted, path, config, tokenizer)
    report = PromptReport(
        path=path,
        rows=len(rows) + len(bad),
        kept=len(kept),
        max_prompt_tokens=config.max_prompt_tokens,
        bad=tuple(bad),
        duplicate_lines=copies,
        contradictions=_contradictions(rows),
        deduplicated=config.deduplicate,
        overlong_lines=overlong,
        overlong_dropped=config.overlong_prompts == "drop",
        text_answer_lines=tuple(
            row.line for row in wanted if not row.answer.removeprefix("-").isdecimal()
        ),
    )
    return Selection(tuple(kept), report)


def usable_rows(path: Path, config: DataConfig, tokenizer: Tokenizer | None = None) -> Selection:
    """As `select_rows`, of a file that a run with `config` would not refuse.

    Raises:
        ValueError: it would, and why.
    """
    selection = select_rows(path, config, tokenizer)
    if refusals := selection.refusals(config):
        raise ValueError("\n".join(refusals))
    return selection


def _tokenise(
    rows: Sequence[Row], path: Path, config: DataConfig, tokenizer: Tokenizer
) -> tuple[list[SelectedRow], tuple[int, ...]]:
    """Rows as text and ids, over-long ones by the policy, and the lines of those."""
    limit = config.max_prompt_tokens
    kept: list[SelectedRow] = []
    overlong: list[int] = []
    for row in rows:
        try:
            text = format_prompt(row.messages, config.prompt_format, tokenizer)
        except ValueError as error:
            raise ValueError(f"{path} line {row.line}: {error}") from error
        token_ids = tokenizer.encode(text)
        if not token_ids:
            raise ValueError(f"{path} line {row.line}: the tokenizer finds no token in the prompt")
        if len(token_ids) > limit:
            overlong.append(row.line)
            if config.overlong_prompts == "drop":
                continue
            token_ids = token_ids[-limit:]
            text = tokenizer.decode(token_ids)
        kept.append(SelectedRow(row, text, tuple(token_ids)))
    return kept, tuple(overlong)


def _same_prompt(rows: Sequence[Row]) -> tuple[tuple[int, ...], ...]:
    lines: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in rows:
        lines[tuple(text for turn in row.messages for text in turn.values())].append(row.line)
    return tuple(tuple(group) for group in lines.values() if len(group) > 1)


def _contradictions(rows: Sequence[Row]) -> tuple[Contradiction, ...]:
    lines: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    keys: dict[tuple[str, ...], str] = {}
    for row in rows:
        texts = tuple(turn["content"] for turn in row.messages)
        if texts not in keys:
            keys[texts] = question_key(texts)
        lines[keys[texts]][row.answer].append(row.line)
    return tuple(
        Contradiction(tuple((answer, tuple(found)) for answer, found in answers.items()))
        for answers in lines.values()
        if len(answers) > 1 and len({_value(answer) for answer in answers}) > 1
    )


def _value(answer: str) -> ExactSum | str:
    """What an answer says, so that 1/2 and 0.5 are no contradiction."""
    try:
        return parse_answer(answer).value
    except AnswerError:
        return answer
