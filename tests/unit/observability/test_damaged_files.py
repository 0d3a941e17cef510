"""Files of a run that something else has written into, or that a disk has damaged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from megatron_dapo.observability.report import write_report
from megatron_dapo.observability.run_files import METRICS_FILE, SAMPLES_FILE, read_metrics
from megatron_dapo.observability.sinks import Sinks
from tests.unit.config.runs import make_config

GOOD = {
    "step": 1,
    "reward/acc/mean": 0.5,
    "timing_s/gen": 1.0,
    "training/rollout_probs_diff_max": 0.01,
}
UNKNOWN = ["abc", [1], {"a": 1}, None, math.inf, math.nan, 1e308, -1e308, 10**400]
NO_STEPS = [-5, 10**30, 10**400, True, 2.5, "2"]
DEEP = '{"step": 2, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"


def write(folder: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / METRICS_FILE).write_text("".join(f"{text}\n" for text in texts))
    return folder / METRICS_FILE


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: repr(value)[:12])
def test_what_is_no_number_of_a_run_is_not_known_and_not_drawn(
    tmp_path: Path, value: object
) -> None:
    pytest.importorskip("matplotlib")
    damaged = dict.fromkeys(GOOD, value) | {"step": 2}
    found = read_metrics(write(tmp_path, GOOD, damaged, GOOD | {"step": 3}))
    assert all(map(math.isnan, found[2].values()))
    assert len(found[2]) == len(found[3]) == len(GOOD) - 1
    assert found[1] == found[3]
    assert write_report(tmp_path).is_file()


@pytest.mark.parametrize("line", [*(GOOD | {"step": step} for step in NO_STEPS), DEEP])
def test_a_line_that_is_no_step_of_a_run_is_left_out_and_a_run_goes_on(
    tmp_path: Path, line: object, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, GOOD, line)
    assert list(read_metrics(path)) == [1]
    assert "line 2" in caplog.text and "left out" in caplog.text
    config = make_config(logging={"console": False}).model_copy(update={"run_dir": tmp_path})
    sinks = Sinks.open(config)
    sinks.log(2, {"reward/acc/mean": 0.6})
    sinks.close()
    assert list(read_metrics(path)) == [1, 2]


def test_text_in_any_code_reaches_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, GOOD)
    (tmp_path / SAMPLES_FILE).write_text('{"step": 1, "response": "half \\ud800"}\n{"step": 1}\n')
    (tmp_path / "config.resolved.yaml").write_bytes(b"seed: 4 # \xe9\n")
    assert "half ?" in (page := write_report(tmp_path).read_text())
    assert "seed: 4" in page


def test_a_directory_of_a_name_in_no_code_has_a_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / os.fsdecode(b"run \xff")
    folder.mkdir()
    write(folder, GOOD | {"val-core/half \ud800/acc/mean@1": 0.5})
    assert write_report(folder).is_file()
