"""One line a step: colours on a terminal, plain text in a log file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.text import Text

_SPEED = "perf/throughput"
_VALIDATION = re.compile(r"val-core/(?P<set>.*)/acc/mean@\d+")


def console_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """`step 12/400 reward .41 acc .46 len 812 ... · gen 61s train 22s sync 2s · 1.9k tok/s`.

    What `metrics` lacks is left out; held-out accuracies stand at the end.
    """
    return line_text(step, steps, metrics).plain


def line_text(step: int, steps: int, metrics: Mapping[str, float]) -> Text:
    """`console_line` with styles: names dim, numbers bright."""
    sections = [
        [(f"step {step}/{steps}", ""), *_pairs(_POLICY_FIELDS, metrics)],
        _pairs(_TIME_FIELDS, {**metrics, **_training_seconds(metrics)}),
        [(f"{_amount(metrics[_SPEED])} tok/s", "")] if _SPEED in metrics else [],
        [
            (f"val {found['set']}", _fraction(value))
            for name, value in metrics.items()
            if (found := _VALIDATION.fullmatch(name))
        ],
    ]
    return Text(" · ", style="dim").join(_section(pairs) for pairs in sections if pairs)


class ConsoleSink:
    """Writes each step's line to standard output."""

    name = "console"

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console(highlight=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = line_text(step, self._steps, metrics)
        self._console.print(line, soft_wrap=True, overflow="ignore")

    def log_samples(self, step: int, rows: list[dict[str, object]]) -> None:
        """Responses are too long for a line."""

    def close(self, *, complete: bool) -> None:
        """Standard output stays open."""


def _section(pairs: list[tuple[str, str]]) -> Text:
    return Text(" ").join(
        Text.assemble((name, "dim"), " ", (value, "bold")) if value else Text(name, style="bold")
        for name, value in pairs
    )


def _fraction(value: float) -> str:
    """Two places, and no zero before the point: .41, -.33, 1.00."""
    return re.sub(r"^(-?)0\.", r"\1.", f"{value:.2f}")


def _length(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _power(value: float) -> str:
    """One digit and the power of ten: 1e-5."""
    return re.sub(r"e(-?)\+?0*(\d)", r"e\1\2", f"{value:.0e}") if value else "0"


def _seconds(value: float) -> str:
    text = f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"
    return text.removeprefix("0") + "s" if text != "0" else "0s"


def _amount(value: float) -> str:
    """Two digits with k, M, G: 950, 1.9k, 12k, 1.2M."""
    if not math.isfinite(value):
        return str(value)
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if scaled >= 9.95 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}"


def _training_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """All passes of the policy and of a critic as one number."""
    phases = ("old_log_prob", "values", "update_critic", "update_actor")
    parts = [f"timing_s/{name}" for name in phases]
    present = [metrics[name] for name in parts if name in metrics]
    return {"train": sum(present)} if present else {}


_Field = tuple[str, str, Callable[[float], str]]

_POLICY_FIELDS: tuple[_Field, ...] = (
    ("reward", "reward/mean", _fraction),
    ("acc", "reward/acc/mean", _fraction),
    ("len", "response_length/mean", _length),
    ("trunc", "response_length/clip_ratio", _percent),
    ("ent", "actor/entropy", _fraction),
    ("gap", "training/rollout_probs_diff_mean", _power),
)
_TIME_FIELDS: tuple[_Field, ...] = (
    ("gen", "timing_s/gen", _seconds),
    ("train", "train", _seconds),
    ("sync", "timing_s/weight_sync", _seconds),
)


def _pairs(fields: tuple[_Field, ...], metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(label, show(metrics[name])) for label, name, show in fields if name in metrics]
