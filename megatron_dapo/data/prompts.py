"""Prompt files -> prompts, with an account of every row; and their seeded, resumable order."""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.config.schema import DataConfig
from megatron_dapo.data.prompt_format import format_prompt
from megatron_dapo.data.rows import BadRow, Row, read_rows
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.types import Prompt

logger = logging.getLogger(__name__)
_NOT_ALPHANUMERIC = re.compile(r"[^a-z0-9]")
_LISTED = 5
"""Lines that a message names; the report holds them all."""


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
    conflicting_lines: tuple[tuple[int, ...], ...]
    """Lines whose prompts say the same up to case and punctuation, with different answers."""
    deduplicated: bool
    """True: of `duplicate_lines` only the first was kept."""
    overlong_lines: tuple[int, ...]
    """More than `max_prompt_tokens`."""
    overlong_dropped: bool
    """False: cut on the left to the limit."""
    text_answer_lines: tuple[int, ...]
    """Kept, but the answer is no integer: it will be compared as text or as a rational."""

    @property
    def copies(self) -> int:
        """Rows that repeat an earlier prompt."""
        return sum(len(lines) - 1 for lines in self.duplicate_lines)

    def summary(self) -> str:
        """One line for the log."""
        fate = "dropped" if self.overlong_dropped else "cut on the left"
        parts = [f"{self.path}: {self.kept} prompts of {self.rows} rows"]
        if self.bad:
            parts.append(f"{len(self.bad)} bad rows ({_listed(self.bad)})")
        if self.copies:
            verb = "dropped" if self.deduplicated else "kept"
            parts.append(f"{self.copies} copies {verb} ({len(self.duplicate_lines)} prompts)")
        for what, lines in (
            (f"over {self.max_prompt_tokens} tokens {fate}", self.overlong_lines),
            ("with an answer that is no integer", self.text_answer_lines),
        ):
            if lines:
                parts.append(f"{len(lines)} {what} (lines {_listed(lines)})")
        if self.conflicting_lines:
            groups = _listed([f"({', '.join(map(str, ls))})" for ls in self.conflicting_lines])
            parts.append(f"{len(self.conflicting_lines)} with different answers (lines {groups})")
        return "; ".join(parts)


def _listed(items: Sequence[object]) -> str:
    more = ", ..." if len(items) > _LISTED else ""
    return ", ".join(str(item) for item in items[:_LISTED]) + more


@dataclass(frozen=True)
class PromptSet:
    """Prompts in file order with unique ids, and what happened to the other rows."""

    prompts: tuple[Prompt, ...]
    report: PromptReport

    @classmethod
    def load(cls, path: Path, config: DataConfig, tokenizer: Tokenizer) -> PromptSet:
        """Read, check, de-duplicate, format and tokenise a prompt file.

        A prompt's id is its `extra_info.index` where every kept row has one and all differ, else
        its line number.

        Raises:
            ValueError: bad rows with `bad_rows=error`, over-long prompts with
                `overlong_prompts=error`, or nothing left; the message names lines and reasons.
        """
        rows, bad = _read(path, config)
        copies = _same_prompt(rows)
        repeated = {line for lines in copies for line in lines[1:]} if config.deduplicate else set()
        wanted = [row for row in rows if row.line not in repeated]
        kept, overlong = _tokenise(wanted, path, config, tokenizer)
        report = PromptReport(
            path=path,
            rows=len(rows) + len(bad),
            kept=len(kept),
            max_prompt_tokens=config.max_prompt_tokens,
            bad=tuple(bad),
            duplicate_lines=copies,
            conflicting_lines=_conflicts(rows),
            deduplicated=config.deduplicate,
            overlong_lines=tuple(overlong),
            overlong_dropped=config.overlong_prompts == "drop",
            text_answer_lines=tuple(
                row.line for row in wanted if not row.answer.removeprefix("-").isdecimal()
            ),
        )
        if not kept:
            raise ValueError(f"no prompt is left; {report.summary()}")
        logger.info(report.summary())
        return cls(_prompts(kept), report)


@dataclass(frozen=True, slots=True)
class _Tokenised:
    row: Row
    text: str
    token_ids: tuple[int, ...]


def _read(path: Path, config: DataConfig) -> tuple[list[Row], list[BadRow]]:
    rows: list[Row] = []
    bad: list[BadRow] = []
    for row in read_rows(
        path, prompt_column=config.prompt_column, answer_column=config.answer_column
    ):
        if isinstance(row, Row):
            rows.append(row)
        else:
            bad.append(row)
    if bad and config.bad_rows == "error":
        raise ValueError(
            f"{path}: {len(bad)} of {len(rows) + len(bad)} rows cannot be read: {_listed(bad)}. "
            "Mend them, or set data.bad_rows=skip to go on without them"
        )
    return rows, bad


def _tokenise(
    rows: Sequence[Row], path: Path, config: DataConfig, tokenizer: Tokenizer
) -> tuple[list[_Tokenised], list[int]]:
    """Rows as text and ids within the limit, and the lines that were over it."""
    limit = config.max_prompt_tokens
    kept: list[_Tokenised] = []
    overlong: list[int] = []
    for row in rows:
        try:
            text = format_prompt(row.messages, config.prompt_format, tokenizer)
        except ValueError as error:
            raise ValueError(f"{path} line {row.line}: {error}") from error
        token_ids = tokenizer.encode(text)
        if len(token_ids) > limit:
            overlong.append(row.line)
            if config.overlong_prompts == "drop":
                continue
            token_ids = token_ids[-limit:]
            text = tokenizer.decode(token_ids)
        kept.append(_Tokenised(row, text, tuple(token_ids)))
    if overlong and config.overlong_prompts == "error":
        raise ValueError(
            f"{path}: {len(overlong)} prompts have more than data.max_prompt_tokens={limit} tokens "
            f"(lines {_listed(overlong)}). Raise the limit, or set data.overlong_prompts=drop"
        )
    return kept, overlong


def _prompts(kept: Sequence[_Tokenised]) -> tuple[Prompt, ...]:
    indices = [item.row.index for item in kept]
    by_index = None not in indices and len(set(indices)) == len(indices)
    return tuple(
        Prompt(
            id=str(item.row.index if by_index else item.row.line),
            text=item.text,
            token_ids=item.token_ids,
            answer=item.row.answer,
            source=item.row.source,
        )
        for item in kept
    )


def _same_prompt(rows: Sequence[Row]) -> tuple[tuple[int, ...], ...]:
    lines: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in rows:
        lines[tuple(text for turn in row.messages for text in turn.values())].append(row.line)
    return tuple(tuple(group) for group in lines.values() if len(group) > 1)


def _conflicts(rows: Sequence[Row]) -> tuple[tuple[int, ...], ...]:
    """Lines that ask the same, up to case and punctuation, but do not have the same answer."""
    lines: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        text = " ".join(turn["content"] for turn in row.messages)
        lines[_NOT_ALPHANUMERIC.sub("", text.lower())].setdefault(row.answer, row.line)
    return tuple(tuple(answers.values()) for answers in lines.values() if len(answers) > 1)


class PromptStream:
    """Endless prompts: each epoch every prompt once, in an order that seed and epoch fix.

    The position is part of the checkpoint: after `load_state_dict` the stream goes on as if it had
    never stopped, inside an epoch and across its end.
    """

    def __init__(self, prompt_set: PromptSet, seed: int) -> None:
        self._prompts = prompt_set.prompts
        self._seed = seed
        ids = "\n".join(prompt.id for prompt in self._prompts)
        self._fingerprint = hashlib.sha256(ids.encode()).hexdigest()
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}/{epoch}").shuffle(self._order)

    @property
    def epoch(self) -> int:
        """Full passes over the prompts so far."""
        return self._epoch

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; past the end of an epoch the next one follows at once."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
            end = min(self._position + count - len(taken), len(self._order))
            taken += [self._prompts[i] for i in self._order[self._position : end]]
            self._position = end
        return taken

    def state_dict(self) -> dict[str, int | str]:
        """Everything that `load_state_dict` needs, as plain JSON values."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "prompts": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            RuntimeError: seed or prompts are not those of the state: the order would differ.
        """
        for key, here in (("seed", self._seed), ("prompts", self._fingerprint)):
            if state[key] != here:
                raise RuntimeError(
                    f"the saved prompt order has {key}={state[key]}, this run has {here}: resume "
                    "with the same seed and data, or start a new run"
                )
        self._start_epoch(int(state["epoch"]))
        self._position = int(state["position"])
