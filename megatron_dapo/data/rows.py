"""Rows of a prompt file, each good or bad with its line number and reason."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow.parquet

from megatron_dapo.data.row_formats import (
    Columns,
    find_columns,
    find_prompt_column,
    look_up,
)

if TYPE_CHECKING:
    from megatron_dapo.data.tokenizer import Message

BadReason = Literal["encoding", "json", "prompt", "answer"]
_BATCH_ROWS = 4096
_LONGEST_VALUE = 60
_LONGEST_COLUMNS = 200
"""Characters of an unusable value, and of a list of columns, that a message shows."""
_EXACT_DOUBLE = 2**53
_DECODER = json.JSONDecoder(parse_float=str)
"""Numbers with a point stay text: an integer never passes through a float."""
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_WHOLE = re.compile(r"([+-]?)([0-9]+)(?:\.0*)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One usable row."""

    line: int
    """From 1: line of a JSONL file, row of a parquet file."""
    messages: tuple[Message, ...]
    answer: str
    source: str
    index: str | None
    """Name of the row: `extra_info.index`, `unique_id` or `id`, where the file has it."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """One row that cannot be used."""

    line: int
    reason: BadReason
    detail: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}: {self.detail}"


class _Bad(Exception):
    def __init__(self, reason: BadReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def read_rows(
    path: Path, *, prompt_column: str | None = None, answer_column: str | None = None
) -> Iterator[Row | BadRow]:
    """Every row of a .jsonl or .parquet file, in order; blank lines are skipped.

    Args:
        path: the file.
        prompt_column: text, or list of {"role", "content"}; None: recognised (`row_formats`).
        answer_column: text or whole number; None: recognised. Both names may hold dots into nested
            objects.

    Raises:
        ValueError: no such file, or another kind of file.
    """
    read = _reader(path)
    beginning = (values for _, values in read(path))
    columns = find_columns(beginning, prompt=prompt_column, answer=answer_column)
    return _rows(read(path), columns)


def read_questions(path: Path, *, prompt_column: str | None = None) -> Iterator[Row | BadRow]:
    """As `read_rows`, of a file whose answers do not matter: they are empty.

    Raises:
        ValueError: as `read_rows`.
    """
    read = _reader(path)
    column = prompt_column or find_prompt_column(values for _, values in read(path))
    return _rows(read(path), Columns(column, None))


def _reader(path: Path) -> Callable[[Path], Iterator[tuple[int, object]]]:
    if path.is_dir():
        raise ValueError(f"prompt file {path} is a folder; name the .parquet or .jsonl file in it")
    if not path.is_file():
        raise ValueError(
            f"prompt file {path} does not exist: give the path of a .parquet or .jsonl file"
        )
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise ValueError(f"prompt file {path} must end in .jsonl or .parquet")
    return readers[path.suffix]


def _rows(lines: Iterable[tuple[int, object]], columns: Columns) -> Iterator[Row | BadRow]:
    for line, values in lines:
        try:
            if isinstance(values, _Bad):
                raise values
            yield _row(line, values, columns)
        except _Bad as bad:
            yield BadRow(line, bad.reason, bad.detail)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, object]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
            if not raw.strip():
                continue
            try:
                yield line, _DECODER.decode(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield line, _Bad("encoding", f"not UTF-8 ({error})")
            except (ValueError, RecursionError) as error:
                yield line, _Bad("json", str(error))


def _parquet_rows(path: Path) -> Iterator[tuple[int, object]]:
    line = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=_BATCH_ROWS):
            for values in _batch_rows(batch):
                line += 1
                yield line, values
    except (pyarrow.ArrowException, OSError) as error:
        where = f" behind row {line}" if line else ""
        raise ValueError(f"{path} is not a parquet file, or damaged{where}: {error}") from error


def _batch_rows(batch: pyarrow.RecordBatch) -> Iterator[object]:
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):  # in some row
        for number in range(batch.num_rows):
            try:
                yield from batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield _Bad("encoding", f"not UTF-8 ({error})")
            except (ValueError, OverflowError) as error:  # a date that Python has none for
                yield _Bad("json", f"a value cannot be read ({error})")


def _row(line: int, values: object, columns: Columns) -> Row:
    if not isinstance(values, Mapping):
        raise _Bad("json", f"a row must be an object, not {type(values).__name__}")
    prompt = _lookup(values, columns.prompt, "prompt")
    answer = ""
    if columns.answer is not None:
        answer = _answer(_lookup(values, columns.answer, "answer"), columns.answer)
    return Row(
        line=line,
        messages=_messages(prompt, columns.prompt),
        answer=answer,
        source=_name(values.get("data_source"), "data_source") or "",
        index=_name(_index(values, columns.index), str(columns.index)),
    )


def _name(value: object, column: str) -> str | None:
    """Text or number that names something; None where there is none."""
    if not isinstance(value, int | str):
        return None
    if not _is_unicode(str(value)):
        raise _Bad("encoding", f"{column} holds half of a surrogate pair")
    return str(value)


def _index(values: Mapping[str, object], column: str | None) -> object:
    if column is None:
        return None
    try:
        return look_up(values, column)
    except KeyError:
        return None


def _lookup(values: Mapping[str, object], column: str, reason: BadReason) -> object:
    try:
        return look_up(values, column)
    except KeyError:
        columns = ", ".join(map(str, values))
        shown = _cut(columns, _LONGEST_COLUMNS)
        raise _Bad(reason, f"no {column}; columns are {shown}") from None


def _messages(prompt: object, column: str) -> tuple[Message, ...]:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(turns, list) or not turns:
        raise _Bad("prompt", f"{column} must be text or a list of messages, not {_short(prompt)}")
    for turn in turns:
        texts = [turn.get("role"), turn.get("content")] if isinstance(turn, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise _Bad("prompt", f"{column}: a message needs a role and a text, not {_short(turn)}")
        if not _is_unicode(turn["role"] + turn["content"]):
            raise _Bad("prompt", f"{column} holds half of a surrogate pair")
    if not any(turn["content"].strip() for turn in turns):
        raise _Bad("prompt", f"{column} is empty")
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in turns)


def _answer(value: object, column: str) -> str:
    if isinstance(value, str | int | Decimal) and not isinstance(value, bool):
        text = normal_answer(str(value))
        if text and _is_unicode(text):
            return text
    if isinstance(value, float) and math.isfinite(value):
        if abs(value) < _EXACT_DOUBLE:
            return normal_answer(repr(value))
        raise _Bad("answer", f"{column} {value!r} is stored as floating point: digits may be lost")
    raise _Bad("answer", f"{column} must be text or a number, not {_short(value)}")


def normal_answer(text: str) -> str:
    """Whole numbers without plus sign, leading zeros or ".0"; other answers stripped of blanks.

    Of a worked solution that ends in a line "#### 1,018", as GSM8K has them, the answer is 1018.
    """
    _, mark, final = text.rpartition("\n#### ")
    if mark and "\n" not in final.strip():
        text = _THOUSANDS.sub("", final)
    text = text.strip()
    if whole := _WHOLE.fullmatch(text):
        digits = whole[2].lstrip("0") or "0"
        return f"-{digits}" if whole[1] == "-" and digits != "0" else digits
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _short(value: object) -> str:
    return _cut(repr(value), _LONGEST_VALUE)


def _cut(text: str, longest: int) -> str:
    """`text`, or its beginning, as one line that a terminal can show."""
    text = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(character if character.isprintable() else "?" for character in text)
