"""The picture of rollout_modes: tokens, idle time and speed, and staleness, mode by mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.rollout_modes import Outcome

INK, MUTED, GRID = "#1f2933", "#5f6c7b", "#e4e7eb"
# Okabe and Ito: told apart with any kind of colour vision.
LINES = {
    "reference": ("reference: waves of 3 x", "#000000", "o"),
    "drop": ("drop, one step off", "#D55E00", "s"),
    "carry + continue": ("carry + continue", "#009E73", "^"),
    "async 2": ("async 2", "#0072B2", "X"),
}
"""Mode -> label, colour, marker. What is missing lies on one of them."""
AGES = ("#c9dff0", "#8fbbdd", "#4f8fc4", "#1f5f9e", "#0b2f5c")
"""Light to dark: colour-blind safe in order."""
STYLE = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def draw(main: Sequence[Outcome], sweep: Sequence[Outcome], file: Path) -> None:
    """Three panels as PNG.

    Args:
        main: one keep rate, all modes.
        sweep: all modes at several keep rates.
    """
    with style.context(STYLE):
        figure = Figure(figsize=(12.5, 4.4), layout="constrained")
        tokens, idle, ages = figure.subplots(1, 3, width_ratios=(1, 1.15, 0.95))
        _tokens(tokens, sweep)
        _idle(idle, main)
        _ages(ages, main)
        figure.savefig(file, dpi=110)


def _tokens(axes: Axes, sweep: Sequence[Outcome]) -> None:
    for mode, (label, colour, marker) in LINES.items():
        points = sorted(
            (one.keep_rate, one.account.generated_per_trained) for one in sweep if one.mode == mode
        )
        axes.plot(*zip(*points, strict=True), marker, ls="-", c=colour, ms=5, lw=1.3, label=label)
    rates = [0.18 + 0.01 * index for index in range(75)]
    least = [1 / rate for rate in rates]
    axes.plot(rates, least, "--", c=MUTED, lw=1, label="no waste: 1 / keep rate")
    axes.set_title("Tokens sampled for each trained one")
    axes.set_xlabel("keep rate: share of groups of mixed accuracy")
    axes.set_ylabel("tokens / trained token")
    axes.set_ylim(bottom=0)
    axes.grid(True)
    axes.legend()


def _idle(axes: Axes, main: Sequence[Outcome]) -> None:
    base = main[0].account.step_seconds
    for row, one in enumerate(main):
        for shift, value, colour in (
            (-0.19, one.account.engines_idle, "#0072B2"),
            (0.19, one.account.trainer_idle, "#E69F00"),
        ):
            axes.barh(row + shift, 100 * value, 0.36, color=colour)
            axes.text(100 * value + 1, row + shift, f"{value:.0%}", va="center", fontsize=7)
        faster = base / one.account.step_seconds
        axes.text(116, row, f"{faster:.2f}x", va="center", ha="right", weight="bold")
    axes.text(116, -0.85, "step speed", ha="right", color=MUTED)
    axes.set_yticks(range(len(main)), [one.mode for one in main])
    axes.set_ylim(len(main) - 0.4, -1.2)
    axes.set_xlim(0, 117)
    axes.set_xticks(range(0, 101, 20))
    axes.set_title(f"Idle time at keep rate {main[0].keep_rate:g}")
    axes.set_xlabel("share of time idle, %")
    handles = [axes.barh(0, 0, color=colour) for colour in ("#0072B2", "#E69F00")]
    axes.legend(handles, ["engine slots", "trainer"], loc="lower right", bbox_to_anchor=(0.85, 0))


def _ages(axes: Axes, main: Sequence[Outcome]) -> None:
    for row, one in enumerate(main):
        left = 0.0
        for age, share in one.account.staleness_histogram.items():
            axes.barh(row, 100 * share, 0.7, left=left, color=AGES[min(age, len(AGES) - 1)])
            left += 100 * share
        axes.text(102, row, f"{one.account.staleness_mean:.2f}", va="center", fontsize=8)
    axes.text(102, -0.85, "mean", color=MUTED)
    axes.set_yticks(range(len(main)), [one.mode for one in main])
    axes.set_ylim(len(main) - 0.4, -1.2)
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_title(f"Staleness at keep rate {main[0].keep_rate:g}")
    axes.set_xlabel("share of responses, %")
    handles = [axes.barh(0, 0, color=colour) for colour in AGES]
    labels = ["0 versions", "1", "2", "3", "4"]
    axes.legend(handles, labels, ncols=5, loc="lower center", bbox_to_anchor=(0.5, -0.28))
