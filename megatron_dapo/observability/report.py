"""The story of a run: curve.png, and report.html with its numbers and samples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megatron_dapo.observability.report_page import write_page
from megatron_dapo.observability.run_files import METRICS_FILE, read_metrics

CURVE_FILE = "curve.png"
REPORT_FILE = "report.html"
TRAINING_ACCURACY = "reward/acc/mean"
_HELDOUT_ACCURACY = re.compile(r"val-core/(?P<set>.*)/acc/mean@\d+")

Metrics = Mapping[int, Mapping[str, float]]
"""Step -> name -> value."""


def write_report(run_dir: Path) -> Path:
    """Draw curve.png and report.html into `run_dir` and return the latter's path.

    Raises:
        FileNotFoundError: the run has not logged a step yet.
        ImportError: matplotlib is missing; it comes with the extra `report`.
    """
    from megatron_dapo.observability.curves import draw_curves

    path = run_dir / METRICS_FILE
    metrics = read_metrics(path) if path.is_file() else {}
    if not metrics:
        raise FileNotFoundError(
            f"{path} holds no step: a report needs the directory of a run that has logged one"
        )
    title = headline(run_dir.resolve().name, metrics)
    draw_curves(metrics, heldout_sets(metrics), title=title, out=run_dir / CURVE_FILE)
    return write_page(
        run_dir, metrics, title=title, curve=run_dir / CURVE_FILE, out=run_dir / REPORT_FILE
    )


def heldout_sets(metrics: Metrics) -> dict[str, str]:
    """Metric of the accuracy on each held-out set, by the set's name, in order of appearance."""
    names = dict.fromkeys(name for values in metrics.values() for name in values)
    return {found["set"]: name for name in names if (found := _HELDOUT_ACCURACY.fullmatch(name))}


def headline(run: str, metrics: Metrics) -> str:
    """One line: what was measured, from where to where, in how many steps."""
    chosen = [*heldout_sets(metrics).values(), TRAINING_ACCURACY][0]
    values = [of_step[chosen] for of_step in metrics.values() if chosen in of_step]
    if not values:
        return f"{run}: {max(metrics)} steps"
    what = "training" if chosen == TRAINING_ACCURACY else "held-out"
    change = f"{100 * values[0]:.0f} % → {100 * values[-1]:.0f} %"
    return f"{run}: {what} accuracy {change} in {max(metrics)} steps"
