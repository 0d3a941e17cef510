from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.config.schema import DataConfig
from megatron_dapo.data.decontaminate import (
    STOCK_QUESTIONS,
    Benchmark,
    decontaminate_file,
    find_overlaps,
    read_benchmark,
)
from megatron_dapo.data.prompt_format import dapo_prompt
from megatron_dapo.data.rows import Row
from tests.unit.data.test_prompts import data_config, write

QUESTION = (
    "A farmer has seven red hens and nine white hens, sells three of them at the market and buys "
    "two goats for each of the hens that are left. How many goats are there now?"
)


def row(line: int, text: str) -> Row:
    return Row(line, ({"role": "user", "content": text},), "1", "", None)


def against(*texts: str) -> list[Benchmark]:
    rows = tuple(row(line, text) for line, text in enumerate(texts, start=1))
    return [Benchmark(Path("bench.jsonl"), rows)]


def test_the_same_question_is_found_whatever_its_markup() -> None:
    rows = [row(1, "Find $x+1$."), row(2, "Find $x-1$."), row(3, QUESTION)]
    (found,) = find_overlaps(rows, against(dapo_prompt("find \\(x + 1\\)")))
    assert (found.line, found.benchmark_line, found.exact, found.share) == (1, 1, True, 1.0)


def test_a_question_inside_another_is_found() -> None:
    longer = f"{QUESTION} Give your answer as a number in base ten, and show every single step."
    for train, bench in ((QUESTION, longer), (longer, QUESTION)):
        (found,) = find_overlaps([row(5, train)], against("Nothing alike.", bench))
        assert (found.line, found.benchmark_line, found.exact) == (5, 2, False)
        assert found.share == 1.0
        assert (found.problem, found.benchmark_problem) == (train, bench)


def test_the_share_is_that_of_the_question_with_fewer_ngrams() -> None:
    words = [f"w{chr(97 + i)}{chr(97 + i)}" for i in range(20)]
    part = " ".join(words[:12] + [f"v{word}" for word in words[12:]])
    (found,) = find_overlaps([row(1, part)], against(" ".join(words)), ngram_words=2)
    assert found.share == 11 / 19
    stricter = {"ngram_words": 2, "least_share": 0.6}
    assert find_overlaps([row(1, part)], against(" ".join(words)), **stricter) == ()


def test_stock_phrases_are_no_evidence() -> None:
    stock = "where m and n are relatively prime positive integers, find the value of m plus n."
    letters = "abcdefghijklmnop"
    rows = [row(i, f"The {x}{x}{x} ratio is m over n, {stock}") for i, x in enumerate(letters)]
    assert len(rows) > STOCK_QUESTIONS
    assert find_overlaps(rows, against(f"Quite another ratio is m over n, {stock}")) == ()
    few = rows[: STOCK_QUESTIONS - 2]
    assert find_overlaps(few, against(f"Quite another ratio is m over n, {stock}")) != ()


def test_copies_of_a_question_do_not_make_it_a_stock_phrase() -> None:
    rows = [row(i, f"{QUESTION} Explain.") for i in range(100)]
    assert len(find_overlaps(rows, against(QUESTION))) == 100


def test_short_questions_are_compared_as_a_whole() -> None:
    assert find_overlaps([row(1, "Find x plus one")], against("Find x plus one two")) == ()


@pytest.mark.parametrize(("words", "share"), [(0, 0.5), (8, 0.0), (8, 1.5)])
def test_sizes_that_find_nothing_or_everything_are_refused(words: int, share: float) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        find_overlaps([], [], ngram_words=words, least_share=share)


def test_a_benchmark_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = write(tmp_path, {"problem": QUESTION})
    assert len(read_benchmark(path, "problem").rows) == 1
    with pytest.raises(ValueError, match=r"1 of 1 rows.*FILE:COLUMN \(here prompt\)"):
        read_benchmark(path, "prompt")
    path.write_text("")
    with pytest.raises(ValueError, match="no rows"):
        read_benchmark(path, "prompt")


def test_the_other_rows_are_written_and_pairs_reported(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": QUESTION, "answer": 1}, {"prompt": "2 + 2?", "answer": 4})
    out, report = tmp_path / "clean.jsonl", tmp_path / "pairs.json"
    found = decontaminate_file(path, data_config(path), against(QUESTION), out=out, report=report)
    assert (found.lines, found.rows, found.written) == ((1,), 2, 1)
    assert json.loads(out.read_text())["prompt"][0]["content"] == "2 + 2?"
    (pair,) = json.loads(report.read_text())["pairs"]
    assert (pair["line"], pair["benchmark"], pair["exact"]) == (1, "bench.jsonl", True)


def test_the_overlap_of_the_dapo_set_with_its_benchmarks(shared_data: Path) -> None:
    path = shared_data / "dapo_math_17k.parquet"
    names = ["aime_2024.jsonl", "aime_2025.jsonl", "math_500.jsonl"]
    benchmarks = [read_benchmark(shared_data / name, "prompt") for name in names]
    found = decontaminate_file(path, DataConfig(train=path), benchmarks)
    pairs = {name: [p for p in found.overlaps if p.benchmark.name == name] for name in names}
    assert pairs["aime_2024.jsonl"] == pairs["aime_2025.jsonl"] == []
    assert sum(pair.exact for pair in pairs["math_500.jsonl"]) == 7
    assert len(pairs["math_500.jsonl"]) == len(found.lines) == 36
