"""Files of an evaluation hold every response, and are whole or not there."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from megatron_dapo.observability.evaluation_files import (
    evaluation_file,
    write_report,
    write_samples,
)
from megatron_dapo.observability.run_files import read_lines
from megatron_dapo.observability.samples import sample_row
from megatron_dapo.observability.sinks import Sinks
from megatron_dapo.types import Group, Prompt, Response, Reward


def group(number: int, *accuracies: float | None) -> Group:
    prompt = Prompt(f"p{number}", "why?", (1,), "7")
    responses = tuple(
        Response(
            prompt.id, index, (5, 6), (0.0, 0.0), "stop", 3, 100 + index, f"text \udc00 {index}"
        )
        for index in range(len(accuracies))
    )
    return Group(prompt, responses, tuple(Reward(value, 0.0) for value in accuracies))


SETS = {"aime": [group(0, 1.0, 0.0), group(1, None, 1.0)], "sums": [group(0, 1.0)]}


def test_every_response_is_a_line_with_its_set_and_seed(tmp_path: Path) -> None:
    file = tmp_path / "new" / "samples.jsonl"
    write_samples(file, 5, SETS)
    rows = read_lines(file)
    assert [(r["set"], r["prompt_id"], r["sample_index"], r["accuracy"]) for r in rows] == [
        ("aime", "p0", 0, 1.0),
        ("aime", "p0", 1, 0.0),
        ("aime", "p1", 0, None),
        ("aime", "p1", 1, 1.0),
        ("sums", "p0", 0, 1.0),
    ]
    assert [row["seed"] for row in rows] == [100, 101, 100, 101, 100]
    columns = sample_row(5, SETS["aime"][0], SETS["aime"][0].responses[0], Reward(1.0, 0.0))
    assert set(rows[0]) == {*columns, "set", "seed"}
    assert [path.name for path in file.parent.iterdir()] == ["samples.jsonl"]


def test_a_failure_leaves_the_older_file(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    write_report(file, {"a": 1})
    with pytest.raises(TypeError):
        write_report(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("samples", [True, False])
def test_a_run_writes_both_by_step(tmp_path: Path, samples: bool) -> None:
    sinks = Sinks([], run_dir=tmp_path, samples_per_step=0)
    sinks.log_evaluation(5, SETS, {"aime": {"k": 2}}, samples=samples)
    names = {path.name for path in (tmp_path / "evaluation").iterdir()}
    assert names == {"step_00000005.json"} | ({"step_00000005.jsonl"} if samples else set())
    report = evaluation_file(tmp_path, 5, ".json")
    assert json.loads(report.read_text()) == {"aime": {"k": 2}}


def test_a_folder_that_cannot_be_written_costs_the_record_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "evaluation").write_text("a file")
    sinks = Sinks([], run_dir=tmp_path, samples_per_step=0)
    with caplog.at_level(logging.WARNING):
        sinks.log_evaluation(5, SETS, {})
    assert sinks.failures["evaluation"] == 2
    assert "Training goes on all the same" in caplog.text
