from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from megatron_dapo.config.schema import DataConfig
from megatron_dapo.data.rows import read_rows
from megatron_dapo.data.selection import select_rows
from tests.unit.data.test_prompts import BAD_LINES, data_config, write
from tests.unit.data.word_tokenizer import WordTokenizer


def test_ten_thousand_malformed_lines_are_counted_exactly(tmp_path: Path) -> None:
    choose = random.Random(0)
    kinds = [line for line in BAD_LINES if len(line) < 10_000]
    lines = [choose.choice(kinds) for _ in range(10_000)]
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(lines))
    selection = select_rows(path, data_config(path, bad_rows="skip"))
    assert selection.rows == ()
    assert selection.report.bad_counts == Counter(BAD_LINES[line] for line in lines)
    assert [bad.line for bad in selection.report.bad] == list(range(1, 10_001))
    assert "no prompt is left" in selection.refusals(data_config(path, bad_rows="skip"))[0]


def test_random_bytes_never_raise(tmp_path: Path) -> None:
    choose = random.Random(1)
    good = json.dumps({"prompt": "1 + 1?", "answer": 2}).encode()
    lines = []
    for _ in range(2_000):
        line = bytearray(good)
        for _ in range(choose.randrange(1, 4)):
            line[choose.randrange(len(line))] = choose.randrange(256)
        lines.append(bytes(line).replace(b"\n", b" "))
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(lines))
    report = select_rows(path, data_config(path)).report
    assert report.rows == sum(1 for line in lines if line.strip())


def test_unreadable_values_are_shown_as_one_short_line(tmp_path: Path) -> None:
    hostile = {"\x1b[2J" + "x" * 1_000: "\n"}
    path = write(tmp_path, hostile, {"prompt": hostile, "answer": 1})
    for bad in read_rows(path, prompt_column="prompt", answer_column="answer"):
        assert len(str(bad)) < 300
        assert str(bad).isprintable()


def test_a_contradiction_names_every_line_of_every_answer(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "What is $x$?", "answer": 1},
        {"prompt": "what is x", "answer": 3},
        {"prompt": "What is 1+1?", "answer": 2},
        {"prompt": "What is x?", "answer": 1},
        {"prompt": "What is 1-1?", "answer": 0},
    )
    report = select_rows(path, data_config(path)).report
    (found,) = report.contradictions
    assert found.lines_by_answer == (("1", (1, 4)), ("3", (2,)))
    assert found.lines == (1, 2, 4)


def test_two_spellings_of_an_answer_are_no_contradiction(tmp_path: Path) -> None:
    answers = ["1/2", "0.5", "\\frac{1}{2}"]
    path = write(tmp_path, *({"prompt": f"x{'?' * i}", "answer": a} for i, a in enumerate(answers)))
    assert select_rows(path, data_config(path)).report.contradictions == ()


def test_lengths_are_measured_only_with_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "one two three", "answer": 1}, {"prompt": "one", "answer": 1})
    config = data_config(path, max_prompt_tokens=2)
    assert select_rows(path, config).report.overlong_lines is None
    selection = select_rows(path, config, WordTokenizer())
    assert selection.report.overlong_lines == (1,)
    assert [item.row.line for item in selection.rows] == [2]


def test_every_reason_to_refuse_a_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "one two three", "answer": 1}, {"answer": 1})
    config = data_config(path, max_prompt_tokens=2, overlong_prompts="error")
    refusals = select_rows(path, config, WordTokenizer()).refusals(config)
    assert len(refusals) == 2
    assert "line 2: prompt" in refusals[0]
    assert "max_prompt_tokens=2" in refusals[1]


def test_the_contradictions_of_the_dapo_set(shared_data: Path) -> None:
    path = shared_data / "dapo_math_17k.parquet"
    selection = select_rows(path, DataConfig(train=path))
    report = selection.report
    assert (report.rows, report.unique_prompts, report.copies) == (17_917, 17_290, 627)
    assert len(report.contradictions) == 24
    contradictory = {line for found in report.contradictions for line in found.lines}
    assert {7061, 7081}.isdisjoint(contradictory)  # (2n - 1)/..., (2n + 1)/...
    assert {11436, 11412}.isdisjoint(contradictory)  # Chinese, another problem each
    assert {36, 180} <= contradictory


def test_gsm8k_is_read_through_its_columns(shared_data: Path) -> None:
    path = shared_data / "gsm8k_test.jsonl"
    config = data_config(path, prompt_column="question")
    selection = select_rows(path, config)
    assert (selection.report.rows, selection.report.kept) == (1_319, 1_319)
    assert selection.rows[0].row.answer == "18"
    assert len(selection.report.text_answer_lines) < 20
