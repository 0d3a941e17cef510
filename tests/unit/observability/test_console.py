import io
import math

import pytest
from rich.console import Console

from megatron_dapo.observability.console import ConsoleSink, console_line

STEP = {
    "reward/mean": 0.41,
    "reward/acc/mean": 0.4649,
    "response_length/mean": 811.7,
    "response_length/clip_ratio": 0.03,
    "actor/entropy": 0.521,
    "training/rollout_probs_diff_mean": 1.2e-5,
    "timing_s/gen": 61.3,
    "timing_s/old_log_prob": 7.0,
    "timing_s/update_actor": 15.0,
    "timing_s/weight_sync": 2.0,
    "perf/throughput": 1893.0,
}
LINE = (
    "step 12/400 reward .41 acc .46 len 812 trunc 3% ent .52 gap 1e-5"
    " · gen 61s train 22s sync 2s · 1.9k tok/s"
)


def test_a_step_is_one_line() -> None:
    assert console_line(12, 400, STEP) == LINE


def test_held_out_accuracy_stands_at_the_end() -> None:
    values = STEP | {"val-core/aime2024/acc/mean@32": 0.5, "val-core/aime2024/acc/best@32": 0.8}
    assert console_line(12, 400, values) == f"{LINE} · val aime2024 .50"


def test_what_was_not_measured_is_left_out() -> None:
    assert console_line(0, 20, {"val-core/sums/acc/mean@1": 0.284}) == "step 0/20 · val sums .28"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("reward/mean", -0.334, "reward -.33"),
        ("reward/mean", 1.0, "reward 1.00"),
        ("reward/mean", -1.25, "reward -1.25"),
        ("reward/mean", math.nan, "reward nan"),
        ("response_length/mean", 9.49, "len 9.5"),
        ("response_length/mean", 99.97, "len 100"),
        ("response_length/clip_ratio", 1.0, "trunc 100%"),
        ("training/rollout_probs_diff_mean", 0.0, "gap 0"),
        ("training/rollout_probs_diff_mean", 3.4e-12, "gap 3e-12"),
        ("training/rollout_probs_diff_mean", 0.25, "gap 2e-1"),
        ("timing_s/gen", 0.071, "gen .071s"),
        ("timing_s/gen", 0.0, "gen 0s"),
        ("timing_s/gen", 1.53, "gen 1.5s"),
        ("timing_s/gen", 9.97, "gen 10s"),
        ("timing_s/update_actor", 600.4, "train 600s"),
        ("perf/throughput", 950.4, "950 tok/s"),
        ("perf/throughput", 999.7, "1.0k tok/s"),
        ("perf/throughput", 12_340.0, "12k tok/s"),
        ("perf/throughput", 1.26e6, "1.3M tok/s"),
    ],
)
def test_numbers_are_short(name: str, value: float, shown: str) -> None:
    assert console_line(1, 2, {name: value}).removeprefix("step 1/2").strip(" ·") == shown


def test_a_log_file_gets_plain_text_and_never_a_broken_line() -> None:
    out = io.StringIO()
    ConsoleSink(400, Console(file=out, width=40, highlight=False)).log(12, STEP)
    assert out.getvalue() == f"{LINE}\n"


def test_a_terminal_gets_colours() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", highlight=False)
    ConsoleSink(400, console).log(12, STEP)
    assert "\x1b[" in out.getvalue()
