"""Prompt files that others can read: DAPO-Math-17k's row format, and reports as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

from megatron_dapo.config.whole_files import whole_file
from megatron_dapo.data.rows import Row
from megatron_dapo.data.selection import PromptReport

Json = dict[str, object]
SUFFIXES = (".parquet", ".jsonl")
RULE_STYLE = "rule-lighteval/MATH_v2"
"""`reward_model.style` of the published set: the answer is compared by rule."""


def dapo_row(
    row: Row, *, source: str, answer: str | None = None, problem: str | None = None
) -> Json:
    """`row` in DAPO-Math-17k's format.

    Args:
        row: what was read.
        source: data_source of rows that have none.
        answer: takes the place of the row's answer.
        problem: takes the place of the row's messages, as one user message.
    """
    prompt = [dict(turn) for turn in row.messages]
    if problem is not None:
        prompt = [{"role": "user", "content": problem}]
    return {
        "data_source": row.source or source,
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {
            "ground_truth": row.answer if answer is None else answer,
            "style": RULE_STYLE,
        },
        "extra_info": {"index": row.index or f"line-{row.line}"},
    }


def check_new_file(path: Path, suffixes: Sequence[str] = SUFFIXES) -> None:
    """Refuse a file name before any work is done for it.

    Raises:
        ValueError: the file exists, its folder does not, or its name ends otherwise.
    """
    if path.suffix not in suffixes:
        raise ValueError(f"OUT={path} must end in {' or '.join(suffixes)}")
    if path.exists():
        raise ValueError(f"OUT={path} exists: name another file, nothing is overwritten")
    if not path.parent.is_dir():
        raise ValueError(f"OUT={path}: there is no folder {path.parent}; make it first")


def check_report_file(path: Path | None) -> None:
    """Refuse the name of a report before any work is done for it; an older one is replaced.

    Raises:
        ValueError: the name does not end in .json, its folder does not exist, or it is a folder.
    """
    if path is None:
        return
    if path.suffix != ".json":
        raise ValueError(f"--report={path} must end in .json")
    if path.is_dir():
        raise ValueError(f"--report={path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"--report={path}: there is no folder {path.parent}; make it first")


def write_rows(path: Path, rows: Sequence[Json]) -> None:
    """Write a .parquet or .jsonl file that is either whole or not there."""
    with whole_file(path) as draft:
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), draft)
        else:
            draft.write_text(_json_lines(rows), encoding="utf-8")


def write_json(path: Path, content: object) -> None:
    """Write a JSON file that is either whole or not there; an older one is replaced."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with whole_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


def _json_lines(rows: Iterable[Json]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def report_content(report: PromptReport) -> Json:
    """A report with every line number, for programs."""
    return {
        "file": str(report.path),
        "rows": report.rows,
        "kept": report.kept,
        "unique_prompts": report.unique_prompts,
        "copies": report.copies,
        "copies_dropped": report.deduplicated,
        "duplicate_lines": report.duplicate_lines,
        "bad": {
            "count": len(report.bad),
            "by_reason": report.bad_counts,
            "rows": [
                {"line": bad.line, "reason": bad.reason, "detail": bad.detail} for bad in report.bad
            ],
        },
        "contradictions": [
            [{"answer": answer, "lines": lines} for answer, lines in found.lines_by_answer]
            for found in report.contradictions
        ],
        "max_prompt_tokens": report.max_prompt_tokens,
        "overlong_lines": report.overlong_lines,
        "overlong_dropped": report.overlong_dropped,
        "text_answer_lines": report.text_answer_lines,
    }
