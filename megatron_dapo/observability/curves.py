"""The figure of a run: six panels over its rollout steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

Metrics = Mapping[int, Mapping[str, float]]

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, PURPLE = "#2563eb", "#ea580c", "#0d9488", "#7c3aed"
PALETTE = (ORANGE, GREEN, PURPLE, "#db2777", "#65a30d")
REST = "rest"
MANY_STEPS = 50
"""More points than this are drawn finer, without dots and gaps."""
PHASES = {
    "gen": ("generation", BLUE),
    "old_log_prob": ("old log-probs", "#93c5fd"),
    "update_actor": ("update", ORANGE),
    "update_critic": ("critic", PURPLE),
    "weight_sync": ("weight sync", GREEN),
    REST: (REST, "#cbd2d9"),
}
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.solid_capstyle": "round",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.left": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelcolor": INK,
    "legend.handlelength": 1.4,
}


def draw_curves(metrics: Metrics, heldout: Mapping[str, str], *, title: str, out: Path) -> None:
    """Write the figure as PNG.

    Args:
        metrics: step -> name -> value; panels leave out what is missing.
        heldout: metric of the accuracy on each held-out set, by the set's name.
        title: one line above the panels.
        out: file to write.
    """
    with style.context(STYLE):
        figure = Figure(figsize=(12, 6.4), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, hspace=0.06)  # type: ignore[union-attr, call-arg]
        figure.suptitle(_literal(title), fontsize=14, fontweight="bold", x=0.012, ha="left")
        (accuracy, length, entropy), (clipped, gap, seconds) = figure.subplots(2, 3, sharex=True)
        _accuracy(accuracy, metrics, heldout)
        _length(length, metrics)
        _entropy(entropy, metrics)
        _clipped(clipped, metrics)
        _gap(gap, metrics)
        _seconds(seconds, metrics)
        for axes in (clipped, gap, seconds):
            axes.set_xlabel("rollout step")
        accuracy.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
        accuracy.set_xlim(min(metrics) - 0.6, max(metrics) + 0.6)
        figure.savefig(out, dpi=150, facecolor="white")


def _literal(text: str) -> str:
    """`text` in letters that can be drawn, its dollar signs kept from starting a formula."""
    return text.encode(errors="replace").decode().replace("$", r"\$")


def series(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """Steps that have `name`, and its values there."""
    steps = [step for step, values in metrics.items() if name in values]
    return steps, [metrics[step][name] for step in steps]


def _accuracy(axes: Axes, metrics: Metrics, heldout: Mapping[str, str]) -> None:
    axes.set_title("Accuracy")
    _line(axes, metrics, "reward/acc/mean", label="training prompts", color=BLUE)
    for (source, name), color in zip(heldout.items(), cycle(PALETTE), strict=False):
        label = "held-out prompts" if len(heldout) == 1 else f"held out: {_literal(source)}"
        _line(axes, metrics, name, label=label, color=color, marker="o")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(_percent)
    _legend(axes)


def _length(axes: Axes, metrics: Metrics) -> None:
    axes.set_title("Response length (tokens)")
    _line(axes, metrics, "response_length/p95", label="95th percentile", color="#93c5fd")
    _line(axes, metrics, "response_length/mean", label="mean", color=BLUE)
    axes.set_ylim(bottom=0)
    _legend(axes)


def _entropy(axes: Axes, metrics: Metrics) -> None:
    axes.set_title("Entropy (nats a token)")
    _line(axes, metrics, "actor/entropy", label="", color=PURPLE)
    axes.set_ylim(bottom=0)


def _clipped(axes: Axes, metrics: Metrics) -> None:
    axes.set_title("Clipped tokens")
    _line(axes, metrics, "actor/pg_clipfrac/high", label="at the upper bound", color=ORANGE)
    _line(axes, metrics, "actor/pg_clipfrac/low", label="at the lower bound", color=GREEN)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_percent)
    _legend(axes)


def _gap(axes: Axes, metrics: Metrics) -> None:
    axes.set_title("Engine against trainer, |Δ probability|")
    largest, mean = (f"training/rollout_probs_diff_{kind}" for kind in ("max", "mean"))
    _line(axes, metrics, largest, label="largest", color="#c4b5fd")
    _line(axes, metrics, mean, label="mean", color=PURPLE)
    shown = [v for name in (largest, mean) for v in series(metrics, name)[1] if v > 0]
    if shown:
        axes.set_yscale("log")
        decades = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)) + 0.01)
        axes.set_ylim(10.0 ** decades[0], 10.0 ** decades[1])
        axes.yaxis.set_major_locator(LogLocator(numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())
    _legend(axes)


def _seconds(axes: Axes, metrics: Metrics) -> None:
    """Bars of one step each, the phases on top of each other."""
    axes.set_title("Seconds a step")
    steps, _ = series(metrics, "timing_s/gen")
    below, width = [0.0] * len(steps), 0.9 if len(steps) <= MANY_STEPS else 1.1
    for phase, (label, color) in PHASES.items():
        values = [_phase_seconds(metrics[step], phase) for step in steps]
        axes.bar(steps, values, bottom=below, width=width, label=label, color=color, linewidth=0)
        below = [total + value for total, value in zip(below, values, strict=True)]
    axes.set_ylim(0, 1.35 * max(below, default=1.0))
    axes.legend(loc="upper left", ncols=3, columnspacing=1.2, handlelength=1.0, borderpad=0)


def _phase_seconds(values: Mapping[str, float], phase: str) -> float:
    """Seconds of a phase; "rest" holds the phases without a colour of their own. What is not known
    is not drawn."""
    values = {name: 0.0 if math.isnan(value) else value for name, value in values.items()}
    if phase != REST:
        return values.get(f"timing_s/{phase}", 0.0)
    inside_others_or_outside = ("reward", "step", "testing")
    named = {f"timing_s/{known}" for known in (*PHASES, *inside_others_or_outside)}
    return sum(
        v for name, v in values.items() if name.startswith("timing_s/") and name not in named
    )


@FuncFormatter
def _percent(share: float, _position: int | None) -> str:
    return f"{100 * share:.3g}%"


def _line(
    axes: Axes, metrics: Metrics, name: str, *, label: str, color: str, marker: str = ""
) -> None:
    steps, values = series(metrics, name)
    if steps:
        dots = "o" if len(steps) == 1 else marker if len(steps) <= MANY_STEPS else ""
        thin = 1.8 if len(steps) <= MANY_STEPS else 1.1
        axes.plot(
            steps, values, label=label, color=color, marker=dots, markersize=4, linewidth=thin
        )


def _legend(axes: Axes) -> None:
    if axes.lines:
        axes.legend()
