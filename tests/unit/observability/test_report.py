import re
from pathlib import Path

import pytest

from megatron_dapo.observability.report import headline, heldout_sets, write_report
from megatron_dapo.observability.run_files import append_line

pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(run_dir: Path, steps: int) -> None:
    run_dir.mkdir()
    append_line(run_dir / "metrics.jsonl", {"step": 0, "val-core/sums/acc/mean@1": 0.28})
    for step in range(1, steps + 1):
        values = {
            "reward/acc/mean": step / steps,
            "response_length/mean": 9.0 + step,
            "actor/entropy": 0.3 / step,
            "actor/pg_clipfrac/high": 0.0,
            "training/rollout_probs_diff_mean": 0.0,
            "actor/grad_norm": float("nan"),
            "timing_s/gen": 1.0,
            "timing_s/step": 1.5,
        }
        append_line(run_dir / "metrics.jsonl", {"step": step, **values})
    last = {"step": steps, "val-core/sums/acc/mean@1": 0.925}
    append_line(run_dir / "metrics.jsonl", last)


@pytest.mark.parametrize("steps", [1, 3, 60])
def test_a_run_gets_a_figure_and_a_page(tmp_path: Path, steps: int) -> None:
    run_dir = tmp_path / "my $run"
    write_run(run_dir, steps)
    page = write_report(run_dir)
    assert page == run_dir / "report.html"
    assert (run_dir / "curve.png").read_bytes().startswith(PNG)
    text = page.read_text()
    assert f"my $run: held-out accuracy 28 % → 92 % in {steps} steps" in text
    assert "<td>reward/acc/mean</td>" in text


def test_a_run_that_has_only_been_evaluated_is_drawn(tmp_path: Path) -> None:
    append_line(tmp_path / "metrics.jsonl", {"step": 0, "val-core/sums/acc/mean@1": 0.3})
    assert write_report(tmp_path).is_file()


def test_every_held_out_set_is_drawn() -> None:
    from matplotlib.figure import Figure

    from megatron_dapo.observability.curves import PALETTE, _accuracy

    heldout = {f"set{n}": f"val-core/set{n}/acc/mean@1" for n in range(len(PALETTE) + 1)}
    axes = Figure().subplots()
    _accuracy(axes, {0: dict.fromkeys(heldout.values(), 0.5)}, heldout)
    assert len(axes.lines) == len(heldout)


def test_the_page_escapes_text_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir, 1)
    hostile = "<script>alert('x')</script><img src=http://evil.example/x.png>"
    sample = {
        "step": 1,
        "prompt": hostile,
        "response": hostile,
        "answer": hostile,
        "extracted": hostile,
        "accuracy": None,
        "reward": -1.0,
        "response_tokens": 3,
        "finish_reason": "stop",
    }
    append_line(run_dir / "samples.jsonl", sample)
    (run_dir / "config.resolved.yaml").write_text(f"run_dir: {hostile}\n")
    text = write_report(run_dir).read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 5
    assert re.findall(r"<(?:img|link|script)[^>]*(?:src|href)=\W?(\w+):", text) == ["data"]


def test_the_page_shows_samples_of_the_first_middle_and_last_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir, 5)
    for step in range(1, 6):
        append_line(run_dir / "samples.jsonl", {"step": step, "response": f"response {step}!"})
    text = write_report(run_dir).read_text()
    assert re.findall(r"response \d!", text) == ["response 1!", "response 3!", "response 5!"]


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl holds no step"):
        write_report(tmp_path)


def test_the_headline_speaks_of_what_was_measured() -> None:
    training = {1: {"reward/acc/mean": 0.2}, 9: {"reward/acc/mean": 0.6}}
    assert headline("run", training) == "run: training accuracy 20 % → 60 % in 9 steps"
    assert headline("run", {4: {"actor/lr": 1e-6}}) == "run: 4 steps"


def test_held_out_sets_are_found_by_their_metric() -> None:
    names = ["val-core/aime2024/acc/best@32", "val-core/aime2024/acc/mean@32", "reward/acc/mean"]
    assert heldout_sets({1: dict.fromkeys(names, 0.5)}) == {
        "aime2024": "val-core/aime2024/acc/mean@32"
    }
