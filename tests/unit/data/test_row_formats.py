"""Benchmarks are read as they are published: columns recognised, answers in normal form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.data.row_formats import DAPO, Columns, find_columns, find_prompt_column
from megatron_dapo.data.rows import BadRow, Row, read_rows
from tests.conftest import REPOSITORY

SHARED = REPOSITORY.parent / "shared" / "data"
PUBLISHED: dict[str, tuple[dict[str, object], str, str, str | None]] = {
    "dapo": (
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": "P"}],
            "reward_model": {"ground_truth": "034", "style": "rule"},
            "extra_info": {"index": "a-1"},
        },
        *("P", "34", "a-1"),
    ),
    "gsm8k": (
        {"question": "P", "answer": "12 * 99 = <<12*99=1188>>1188\n#### 1,188"},
        "P",
        "1188",
        None,
    ),
    "math_500": (
        {
            "problem": "P",
            "solution": "so \\boxed{\\frac{3}{4}}",
            "answer": "\\frac{3}{4}",
            "subject": "Algebra",
            "level": 3,
            "unique_id": "test/algebra/1.json",
        },
        *("P", "\\frac{3}{4}", "test/algebra/1.json"),
    ),
    "aime_2024": (
        {
            "id": 60,
            "problem": "P",
            "solution": "so 25",
            "answer": "025",
            "url": "u",
            "year": "2024",
        },
        *("P", "25", "60"),
    ),
    "aime_2024_capitals": (
        {"ID": "2024-I-4", "Problem": "P", "Solution": "so", "Answer": 116},
        *("P", "116", "2024-I-4"),
    ),
    "aime_2025": ({"problem": "P", "answer": "70", "id": "0"}, "P", "70", "0"),
    "amc": ({"id": 0, "problem": "P", "answer": 27.0, "url": "u"}, "P", "27", "0"),
    "mawps": ({"input": "P", "target": 43.0}, "P", "43", None),
    "deepmath": ({"prompt": "P", "ground_truth": "1", "source": "deepmath_103k"}, "P", "1", None),
}
"""Row, and what is read of it: prompt, answer, name."""


def read_one(path: Path, **columns: str) -> Row:
    (row,) = read_rows(path, **columns)
    assert isinstance(row, Row), row
    return row


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_published_format_is_recognised(tmp_path: Path, name: str, suffix: str) -> None:
    import pyarrow
    import pyarrow.parquet

    values, prompt, answer, index = PUBLISHED[name]
    file = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        file.write_text(json.dumps(values) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([values]), file)
    row = read_one(file)
    assert [turn["content"] for turn in row.messages] == [prompt]
    assert (row.answer, row.index) == (answer, index)


def test_given_columns_overrule_and_the_other_one_is_still_recognised(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"problem": "P", "short": "Q", "answer": "1", "second": "2"}))
    assert read_one(file).answer == "1"
    assert read_one(file, answer_column="second").answer == "2"
    assert read_one(file, prompt_column="short").messages[0]["content"] == "Q"


def test_the_first_row_that_fits_decides() -> None:
    rows = [
        "no object",
        {"neither": 1},
        {"question": "P", "answer": "1"},
        {"input": 1, "target": 2},
    ]
    assert find_columns(rows, prompt=None, answer=None) == Columns("question", "answer")
    assert find_columns(rows[:2], prompt=None, answer=None) == DAPO
    assert find_columns([], prompt="x", answer=None) == Columns("x", DAPO.answer)
    assert find_prompt_column(rows) == "question"
    assert find_prompt_column([]) == "prompt"


def test_a_file_of_no_known_columns_names_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "P", "label": "1"}))
    (bad,) = read_rows(file)
    assert str(bad) == "line 1: prompt: no prompt; columns are text, label"


FILES: dict[str, tuple[int, int]] = {
    "aime_2024.jsonl": (30, 30),
    "aime_2025.jsonl": (30, 29),
    "math_500.jsonl": (500, 327),
    "gsm8k_test.jsonl": (1319, 1319),
    "amc23.jsonl": (40, 40),
    "mawps_addsub.jsonl": (395, 269),
    "mawps_singleop.jsonl": (562, 547),
    "aime-2024.parquet": (960, 960),
    "math_aime_eval.parquet": (560, 30 + 29 + 327),
}
"""Rows, and how many have an integer for an answer."""


@pytest.mark.parametrize("name", FILES)
def test_real_files_are_read_whole(name: str) -> None:
    if not (SHARED / name).is_file():
        pytest.skip(f"{name} is not on this machine")
    rows = list(read_rows(SHARED / name))
    assert [row for row in rows if isinstance(row, BadRow)] == []
    count, integers = FILES[name]
    assert len(rows) == count
    answers = [row.answer for row in rows if isinstance(row, Row)]
    assert sum(answer.removeprefix("-").isdecimal() for answer in answers) == integers
    assert not [
        answer
        for answer in answers
        if answer.startswith("0") and answer.isdecimal() and len(answer) > 1
    ]
