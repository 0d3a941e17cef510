import json
import logging
import math
from pathlib import Path

import pytest

from megatron_dapo.observability.run_files import (
    append_line,
    read_metrics,
    read_new_lines,
    read_run_record,
    read_samples,
    write_run_record,
)
from tests.unit.handed import Case, handed_cases


@pytest.mark.parametrize("case", handed_cases("p", "metric_file"))
def test_after_a_resume_the_later_record_of_a_step_counts(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for segment, steps in enumerate(case["input"]["segments"]):
        for step in steps:
            append_line(path, {"step": step, "segment": float(segment)})
    metrics = read_metrics(path)
    assert list(metrics) == case["expect"]["steps"]
    last = float(len(case["input"]["segments"]) - 1)
    for step in case["expect"]["last_wins_for"]:
        assert metrics[step]["segment"] == last


def test_steps_that_a_resume_abandoned_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, run in [(10, 1.0), (11, 1.0), (12, 1.0), (11, 2.0)]:
        append_line(path, {"step": step, "run": run})
    assert read_metrics(path) == {10: {"run": 1.0}, 11: {"run": 2.0}}


def test_training_and_evaluation_of_one_step_are_one_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 5, "reward/mean": 0.5})
    append_line(path, {"step": 5, "val-core/aime/acc/mean@32": 0.25})
    assert read_metrics(path) == {5: {"reward/mean": 0.5, "val-core/aime/acc/mean@32": 0.25}}


def test_a_half_written_line_is_left_out_and_does_not_spoil_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1, "loss": 1.0})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    append_line(path, {"step": 2, "loss": 3.0})
    with caplog.at_level(logging.WARNING):
        assert read_metrics(path) == {1: {"loss": 1.0}, 2: {"loss": 3.0}}
    assert "line 2 is half written" in caplog.text


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1, "grad_norm": math.inf, "loss": math.nan, "lr": 1e-6})
    assert json.loads(path.read_text()) == {"step": 1, "grad_norm": None, "loss": None, "lr": 1e-6}
    values = read_metrics(path)[1]
    assert math.isnan(values["grad_norm"]) and math.isnan(values["loss"])
    assert values["lr"] == 1e-6


def test_text_of_any_kind_survives_as_one_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    append_line(path, {"step": 1, "response": "x\n=\u2028 数 \ud800"})
    assert path.read_bytes().count(b"\n") == 1
    assert read_samples(path)[0]["response"] == "x\n=\u2028 数 ?"


def test_samples_of_a_repeated_step_replace_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for step, text in [(1, "a"), (1, "b"), (2, "c"), (3, "d"), (2, "e"), (2, "f")]:
        append_line(path, {"step": step, "response": text})
    assert [sample["response"] for sample in read_samples(path)] == ["a", "b", "e", "f"]


def test_a_disk_without_room_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="No space left"):
        append_line(Path("/dev/full"), {"step": 1})


def test_the_run_record_comes_back_and_is_replaced_whole(tmp_path: Path) -> None:
    assert read_run_record(tmp_path) == {}
    write_run_record(tmp_path, {"wandb_id": "one"})
    write_run_record(tmp_path, {"wandb_id": "two"})
    assert read_run_record(tmp_path) == {"wandb_id": "two"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_lines_that_are_no_record_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1, "loss": 1.0})
    with path.open("ab") as file:
        file.write(b'[]\n7\n{"loss": 2.0}\n{"step": "2", "loss": 2.0}\n\x00\x00\x00\n\xff\xfe\n')
    append_line(path, {"step": 3, "loss": 3.0})
    assert read_metrics(path) == {1: {"loss": 1.0}, 3: {"loss": 3.0}}
    assert caplog.text.count("left out") == 6


@pytest.mark.parametrize("content", ["", '{"wandb_id": "a', "[1, 2]", "\x00" * 40])
def test_a_damaged_run_record_counts_as_empty(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.json").write_text(content)
    assert read_run_record(tmp_path) == {}
    assert "run.json is damaged" in caplog.text
    write_run_record(tmp_path, {"wandb_id": "abc"})
    assert read_run_record(tmp_path) == {"wandb_id": "abc"}


def test_new_lines_are_read_from_where_the_last_reader_stopped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_new_lines(path, 5) == ([], 0)
    append_line(path, {"step": 1, "a": 0.5})
    found, place = read_new_lines(path, 0)
    assert found == [{"step": 1, "a": 0.5}]
    with path.open("a") as file:
        file.write('{"step": 2, "a"')
    assert read_new_lines(path, place) == ([], place)
    append_line(path, {"step": 2, "a": 1.0})  # what was torn stays a line of its own
    found, place = read_new_lines(path, place)
    assert found == [{"step": 2, "a": 1.0}]
    assert place == path.stat().st_size
    assert read_new_lines(path, place) == ([], place)
    path.write_text('{"step": 9}\n')  # another file under that name
    assert read_new_lines(path, place) == ([{"step": 9}], 12)
