"""What `megatron-dapo eval` shows: progress while it samples, then a table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_dapo.evaluation.estimators import Estimate
from megatron_dapo.evaluation.phrases import ALL
from megatron_dapo.evaluation.set_report import SetReport


@contextlib.contextmanager
def progress(expected: Mapping[str, int]) -> Iterator[Callable[[str], None]]:
    """A bar for each set on a terminal's standard error; yields what moves the bar of a set."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bars:
        tasks = {name: bars.add_task(escape(name), total=count) for name, count in expected.items()}
        yield lambda name: bars.advance(tasks[name])


def result_table(reports: Mapping[str, SetReport]) -> Table:
    """One row a set, in percent; lengths in tokens."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("set")
    for name in ("problems", "k", "right", "avg@k", "pass@k", "maj@k"):
        table.add_column(name, justify="right")
    for name in ("truncated", "ungraded", "tokens", "reflection"):
        table.add_column(name, justify="right")
    for name, report in reports.items():
        counts = report.counts
        passed = report.passed.get(report.k)
        table.add_row(
            escape(name),
            str(report.problems),
            str(report.k),
            f"{counts.right}/{counts.samples}",
            _with_errors(report.avg),
            "-" if passed is None else f"{100 * passed.value:.1f}",
            "-" if report.maj is None else f"{100 * report.maj.value:.1f}",
            f"{100 * report.truncated_share:.1f}",
            str(counts.ungraded),
            f"{report.lengths.mean:.1f}",
            f"{report.phrases[ALL].per_1k_tokens:.2f}",
        )
    return table


LEGEND = (
    "avg@k: percent right, ± standard error over problems (± of sampling the same problems again); "
    "tokens: mean length; reflection: phrases in 1,000 tokens"
)


def _with_errors(estimate: Estimate) -> str:
    text = f"{100 * estimate.value:.1f}"
    if estimate.problem_error is not None:
        text += f" ± {100 * estimate.problem_error:.1f}"
    if estimate.sampling_error is not None:
        text += f" (± {100 * estimate.sampling_error:.1f})"
    return text
