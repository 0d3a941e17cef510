"""Which columns of a prompt file hold problem, answer and name of a row.

Benchmarks are published under a handful of column names. The first rows say which ones a file has,
so that it can be read as it was downloaded; `data.prompt_column` and `data.answer_column` overrule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LOOKED_AT = 100
"""Rows at the beginning of a file that may say what its columns are."""
INDEX_COLUMNS = ("extra_info.index", "unique_id", "id", "ID")
"""Columns with a name of the row, in order of preference."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of columns; dots go into nested objects unless the whole name is a column."""

    prompt: str
    """Text, or list of {"role", "content"}."""
    answer: str | None
    """Text or number; None: answers are not read."""
    index: str | None = INDEX_COLUMNS[0]
    """Name of the row, where it has one; None: not read."""


DAPO = Columns("prompt", "reward_model.ground_truth")
KNOWN_COLUMNS = (
    DAPO,  # DAPO-Math-17k, verl
    Columns("problem", "answer"),  # MATH-500, AIME 2024 and 2025, AMC
    Columns("question", "answer"),  # GSM8K, AIME 2025, AMC
    Columns("Problem", "Answer"),  # AIME 2024
    Columns("Question", "Answer"),
    Columns("input", "target"),  # MAWPS
    Columns("prompt", "ground_truth"),  # DeepMath
    Columns("prompt", "answer"),
)
"""Pairs of columns that are recognised, the first one that a row has."""


def find_columns(rows: Iterable[object], *, prompt: str | None, answer: str | None) -> Columns:
    """The columns of a file.

    Args:
        rows: of the file, from the beginning; what is no object is passed over.
        prompt: given by the user; None: recognised.
        answer: the same.

    Returns:
        What the first row that fits says; DAPO-Math-17k's columns where none does, so that the
        reader can say of each row what it lacks.
    """
    for row in itertools.islice(rows, LOOKED_AT):
        if not isinstance(row, Mapping):
            continue
        for known in KNOWN_COLUMNS:
            wanted = Columns(prompt or known.prompt, answer or known.answer)
            if holds(row, wanted.prompt) and holds(row, wanted.answer or ""):
                names = (name for name in INDEX_COLUMNS if holds(row, name))
                index = next(names, INDEX_COLUMNS[0])  # later rows may have it
                return Columns(wanted.prompt, wanted.answer, index)
    return Columns(prompt or DAPO.prompt, answer or DAPO.answer)


def find_prompt_column(rows: Iterable[object]) -> str:
    """The column of the problems alone, as `find_columns` would take it without answers."""
    for row in itertools.islice(rows, LOOKED_AT):
        if isinstance(row, Mapping):
            for known in KNOWN_COLUMNS:
                if holds(row, known.prompt):
                    return known.prompt
    return DAPO.prompt


def holds(row: Mapping[str, object], column: str) -> bool:
    """True where `look_up` finds the column."""
    try:
        look_up(row, column)
    except KeyError:
        return False
    return True


def look_up(row: Mapping[str, object], column: str) -> object:
    """Value of a column; dots go into nested objects unless the whole name is a column.

    Raises:
        KeyError: the row has no such column.
    """
    if column in row:
        return row[column]
    found: object = row
    for part in column.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise KeyError(column)
        found = found[part]
    return found
