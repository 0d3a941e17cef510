"""A clean prompt file out of a raw one, with an account of every row that is not in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_dapo.config.schema import DataConfig
from megatron_dapo.data.row_files import (
    check_new_file,
    dapo_row,
    report_content,
    write_json,
    write_rows,
)
from megatron_dapo.data.selection import PromptReport, usable_rows

if TYPE_CHECKING:
    from megatron_dapo.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prepared:
    """What was written, and from what."""

    report: PromptReport
    written: int
    contradictory: tuple[int, ...]
    """Lines that were left out because others that ask the same have another answer."""
    report_file: Path


def report_path(out: Path) -> Path:
    """Where the report of a written file lies."""
    return out.with_name(f"{out.name}.report.json")


def prepare_file(
    path: Path,
    out: Path,
    config: DataConfig,
    *,
    tokenizer: Tokenizer | None = None,
    contradictory: Literal["drop", "keep"] = "drop",
) -> Prepared:
    """Write the rows of `path` that a run would train on, in DAPO-Math-17k's format.

    Messages stay as they are; only which rows are there changes, and the form of answers. Rows
    that are to be cut on the left are written whole: the cut depends on the tokenizer of a run.

    Args:
        path: .parquet or .jsonl.
        out: .parquet or .jsonl that does not exist; `report_path(out)` is written beside it.
        config: columns, and what happens to bad, repeated and over-long rows.
        tokenizer: without it no prompt counts as over-long.
        contradictory: whether rows stay whose answer another row denies.

    Raises:
        ValueError: a run with `config` would refuse the file, or `out` cannot be written.
    """
    check_new_file(out)
    selection = usable_rows(path, config, tokenizer)
    denied: set[int] = set()
    if contradictory == "drop":
        denied = {line for found in selection.report.contradictions for line in found.lines}
    rows = [item.row for item in selection.rows if item.row.line not in denied]
    if not rows:
        raise ValueError(f"{path}: every row contradicts another; see `megatron-dapo data check`")
    left_out = tuple(item.row.line for item in selection.rows if item.row.line in denied)
    write_rows(out, [dapo_row(row, source=path.stem) for row in rows])
    content = report_content(selection.report) | {
        "out": str(out),
        "written": len(rows),
        "contradictory_lines_dropped": left_out,
    }
    write_json(report_path(out), content)
    return Prepared(selection.report, len(rows), left_out, report_path(out))
