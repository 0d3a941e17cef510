from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.data.prepare import prepare_file
from megatron_dapo.data.rows import Row, read_rows
from tests.unit.data.test_prompts import data_config, write
from tests.unit.data.word_tokenizer import WordTokenizer

ROWS = [
    {"prompt": "What is $x$?", "answer": "03"},
    {"prompt": "What is y?", "answer": 7, "extra_info": {"index": "y-1"}, "data_source": "books"},
    {"prompt": "What is y?", "answer": 7},
    {"prompt": "what is x", "answer": 4},
    {"prompt": "z", "answer": None},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_clean_file_reads_back_as_dapo_rows(tmp_path: Path, suffix: str) -> None:
    path, out = write(tmp_path, *ROWS), tmp_path / f"clean{suffix}"
    prepared = prepare_file(path, out, data_config(path, bad_rows="skip"), contradictory="keep")
    answer_column = "reward_model.ground_truth"
    rows = list(read_rows(out, prompt_column="prompt", answer_column=answer_column))
    assert all(isinstance(row, Row) for row in rows)
    assert [row.answer for row in rows] == ["3", "7", "4"]  # type: ignore[union-attr]
    assert [row.source for row in rows] == ["train", "books", "train"]  # type: ignore[union-attr]
    assert [row.index for row in rows] == ["line-1", "y-1", "line-4"]  # type: ignore[union-attr]
    assert prepared.written == 3


def test_rows_that_another_denies_are_left_out_and_listed(tmp_path: Path) -> None:
    path, out = write(tmp_path, *ROWS), tmp_path / "clean.jsonl"
    prepared = prepare_file(path, out, data_config(path, bad_rows="skip"))
    assert prepared.contradictory == (1, 4)
    report = json.loads(prepared.report_file.read_text())
    assert report["contradictory_lines_dropped"] == [1, 4]
    assert report["written"] == len(out.read_text().splitlines()) == 1
    assert report["bad"]["by_reason"] == {"answer": 1}
    assert report["bad"]["rows"][0]["line"] == 5
    assert report["duplicate_lines"] == [[2, 3]]


def test_overlong_rows_go_by_the_policy(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "one two three", "answer": 1}, {"prompt": "one", "answer": 1})
    for policy, written in (("drop", 1), ("truncate_left", 2)):
        config = data_config(path, max_prompt_tokens=2, overlong_prompts=policy)
        out = tmp_path / f"{policy}.jsonl"
        prepared = prepare_file(path, out, config, tokenizer=WordTokenizer())
        assert prepared.written == written
        assert prepared.report.overlong_lines == (1,)
    assert "one two three" in out.read_text()


def test_nothing_is_written_where_a_run_would_refuse_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, *ROWS)
    with pytest.raises(ValueError, match="line 5: answer"):
        prepare_file(path, tmp_path / "clean.jsonl", data_config(path))
    with pytest.raises(ValueError, match="every row contradicts another"):
        both = write(tmp_path, ROWS[0], ROWS[3])
        prepare_file(both, tmp_path / "clean.jsonl", data_config(both))
    assert [file.name for file in tmp_path.iterdir()] == ["train.jsonl"]


def test_the_output_is_refused_before_the_file_is_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    config = data_config(missing)
    with pytest.raises(ValueError, match=r"must end in \.parquet or \.jsonl"):
        prepare_file(missing, tmp_path / "clean.csv", config)
    with pytest.raises(ValueError, match="there is no folder"):
        prepare_file(missing, tmp_path / "no" / "clean.jsonl", config)
    (tmp_path / "old.jsonl").touch()
    with pytest.raises(ValueError, match="nothing is overwritten"):
        prepare_file(missing, tmp_path / "old.jsonl", config)
