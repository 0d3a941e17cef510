"""Training rows that a benchmark asks, too: the same question, or most of its words in a row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dapo.config.schema import DataConfig
from megatron_dapo.data.question_key import question_words
from megatron_dapo.data.row_files import (
    check_new_file,
    check_report_file,
    dapo_row,
    write_json,
    write_rows,
)
from megatron_dapo.data.rows import BadRow, Row, read_questions
from megatron_dapo.data.selection import listed, usable_rows

NGRAM_WORDS = 8
LEAST_SHARE = 0.5
STOCK_QUESTIONS = 10
"""An n-gram of more different questions is a stock phrase ("where m and n are relatively prime")
and says nothing about any of them."""
_FEWEST_NGRAMS = 4
"""A question with fewer n-grams of its own is compared as a whole only."""

Words = tuple[str, ...]
Ngram = tuple[str, ...]


@dataclass(frozen=True)
class Benchmark:
    """A file that must stay unseen."""

    path: Path
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """One pair of a training row and a benchmark's row."""

    line: int
    benchmark: Path
    benchmark_line: int
    share: float
    """Of the n-grams of the shorter question, those that the other has; 1 when exact."""
    exact: bool
    problem: str
    benchmark_problem: str


@dataclass(frozen=True)
class _Question:
    row: Row
    benchmark: Path
    ngrams: int


def read_benchmark(path: Path, prompt_column: str | None) -> Benchmark:
    """Questions of a .parquet or .jsonl file; its answers are not read.

    Raises:
        ValueError: the file, or one of its rows, cannot be read: nothing may go by unseen.
    """
    rows = list(read_questions(path, prompt_column=prompt_column))
    bad = [row for row in rows if isinstance(row, BadRow)]
    if bad or not rows:
        what = f"{len(bad)} of {len(rows)} rows cannot be read: {listed(bad)}" if bad else "no rows"
        here = "" if prompt_column is None else f" (here {prompt_column})"
        raise ValueError(f"{path}: {what}. Name the column of its questions: FILE:COLUMN{here}")
    return Benchmark(path, tuple(row for row in rows if isinstance(row, Row)))


@dataclass(frozen=True)
class Decontaminated:
    """Pairs that were found, and what was written without them."""

    overlaps: tuple[Overlap, ...]
    rows: int
    """Rows of the training file that were compared."""
    written: int | None
    """None: no file was asked for."""

    @property
    def lines(self) -> tuple[int, ...]:
        """Training rows with at least one pair."""
        return tuple(sorted({overlap.line for overlap in self.overlaps}))


def decontaminate_file(
    path: Path,
    config: DataConfig,
    benchmarks: Sequence[Benchmark],
    *,
    out: Path | None = None,
    report: Path | None = None,
    ngram_words: int = NGRAM_WORDS,
    least_share: float = LEAST_SHARE,
) -> Decontaminated:
    """Compare a prompt file with benchmarks and write the rows that none of them asks.

    Args:
        path: .parquet or .jsonl.
        config: columns, and what happens to bad and repeated rows.
        benchmarks: what must not be in it.
        out: .parquet or .jsonl in DAPO-Math-17k's format; must not exist.
        report: JSON file with every pair.
        ngram_words: see `find_overlaps`.
        least_share: see `find_overlaps`.

    Raises:
        ValueError: a run with `config` would refuse the file, `out` or `report` cannot be written,
            or nothing would be left for `out`.
    """
    check_report_file(report)
    if out is not None:
        check_new_file(out)
    rows = [item.row for item in usable_rows(path, config).rows]
    overlaps = find_overlaps(rows, benchmarks, ngram_words=ngram_words, least_share=least_share)
    lines = {overlap.line for overlap in overlaps}
    clean = [row for row in rows if row.line not in lines]
    if report is not None:
        pairs = [asdict(found) | {"benchmark": str(found.benchmark)} for found in overlaps]
        write_json(report, {"file": str(path), "rows": len(rows), "pairs": pairs})
    if out is not None and not clean:
        raise ValueError(f"{path}: a benchmark asks every row; nothing is left for OUT={out}")
    if out is not None:
        write_rows(out, [dapo_row(row, source=path.stem) for row in clean])
    return Decontaminated(overlaps, len(rows), None if out is None else len(clean))


def find_overlaps(
    rows: Sequence[Row],
    benchmarks: Sequence[Benchmark],
    *,
    ngram_words: int = NGRAM_WORDS,
    least_share: float = LEAST_SHARE,
) -> tuple[Overlap, ...]:
    """Pairs that are the same question, by training row and then benchmark.

    Two questions overlap when they are equal in normal form (case, markup and punctuation do not
    count, operators do), or when at least `least_share` of the n-grams of the one that has fewer
    stand in the other. Numbers and operators are words of an n-gram; stock phrases are left out.

    Args:
        rows: training rows.
        benchmarks: rows that must not be among them.
        ngram_words: words of an n-gram.
        least_share: in (0, 1]; 1 finds only questions that hold the other one entirely.

    Raises:
        ValueError: a size below 1, or a share outside (0, 1].
    """
    if ngram_words < 1 or not 0 < least_share <= 1:
        raise ValueError(
            f"ngram_words={ngram_words}, least_share={least_share}: ngram_words must be 1 or more, "
            "least_share above 0 and at most 1"
        )
    words_of = [_words(row) for row in rows]
    stock = _stock_phrases([*words_of, *_benchmark_words(benchmarks)], ngram_words)
    index = _Index(benchmarks, ngram_words, stock)
    return tuple(
        Overlap(
            line=row.line,
            benchmark=question.benchmark,
            benchmark_line=question.row.line,
            share=share,
            exact=exact,
            problem=_text(row),
            benchmark_problem=_text(question.row),
        )
        for row, words in zip(rows, words_of, strict=True)
        for question, share, exact in index.matches(words, least_share)
    )


class _Index:
    """Questions of benchmarks by their words and by their n-grams."""

    def __init__(self, benchmarks: Sequence[Benchmark], size: int, stock: Set[Ngram]) -> None:
        self._size = size
        self._stock = stock
        self._questions: list[_Question] = []
        self._by_words: defaultdict[Words, list[int]] = defaultdict(list)
        self._by_ngram: defaultdict[Ngram, list[int]] = defaultdict(list)
        for benchmark in benchmarks:
            for row in benchmark.rows:
                words = _words(row)
                ngrams = _ngrams(words, size) - stock
                self._by_words[words].append(len(self._questions))
                for ngram in ngrams:
                    self._by_ngram[ngram].append(len(self._questions))
                self._questions.append(_Question(row, benchmark.path, len(ngrams)))

    def matches(self, words: Words, least_share: float) -> Iterator[tuple[_Question, float, bool]]:
        """(question, share, exact) of every question that overlaps, in the benchmarks' order."""
        ngrams = _ngrams(words, self._size) - self._stock
        common = Counter(number for ngram in ngrams for number in self._by_ngram.get(ngram, ()))
        same = self._by_words.get(words, ())
        for number in sorted({*common, *same}):
            question = self._questions[number]
            if number in same:
                yield question, 1.0, True
                continue
            fewer = min(len(ngrams), question.ngrams)
            share = common[number] / fewer
            if fewer >= _FEWEST_NGRAMS and share >= least_share:
                yield question, share, False


def _stock_phrases(questions: Iterable[Words], size: int) -> frozenset[Ngram]:
    """N-grams of more than `STOCK_QUESTIONS` different questions."""
    counts = Counter(ngram for words in set(questions) for ngram in _ngrams(words, size))
    return frozenset(ngram for ngram, count in counts.items() if count > STOCK_QUESTIONS)


def _benchmark_words(benchmarks: Sequence[Benchmark]) -> Iterator[Words]:
    return (_words(row) for benchmark in benchmarks for row in benchmark.rows)


def _words(row: Row) -> Words:
    return tuple(word for turn in row.messages for word in question_words(turn["content"]))


def _text(row: Row) -> str:
    return "\n".join(turn["content"] for turn in row.messages)


def _ngrams(words: Words, size: int) -> set[Ngram]:
    return {words[start : start + size] for start in range(len(words) - size + 1)}
