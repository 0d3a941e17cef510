import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_dapo.config import RunConfig
from megatron_dapo.observability.run_files import read_metrics, read_samples
from megatron_dapo.observability.samples import sample_row, spread
from megatron_dapo.observability.sinks import JsonLinesSink, Sinks, TensorBoardSink
from megatron_dapo.types import Group, Prompt, Response, Reward
from tests.logging_services import tensorboard_points


def run_config(run_dir: Path, **logging_keys: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": run_dir,
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "training": {"steps": 20},
            "rollout": {"endpoints": ["http://user:hunter2@127.0.0.1:8000"]},
            "logging": {"console": False} | logging_keys,
        }
    )


def group(name: str, size: int = 2) -> Group:
    members = range(size)
    return Group(
        Prompt(id=name, text="1+2=\n", token_ids=(1, 2), answer="3"),
        tuple(
            Response(
                prompt_id=name,
                sample_index=member,
                token_ids=(7, 0),
                rollout_logprobs=(-0.5, -0.1),
                finish_reason="stop",
                policy_version=4,
                version_spans=((0, 4), (1, 5)),
                seed=member,
                text=f"Answer: {member}",
            )
            for member in members
        ),
        tuple(
            Reward(
                accuracy=float(member == 3),
                score=-1.0,
                overlong=-0.25,
                parts={"format": 0.5},
                extracted=str(member),
            )
            for member in members
        ),
    )


def test_metrics_and_samples_of_a_step_are_in_the_files_at_once(tmp_path: Path) -> None:
    sinks = Sinks.open(run_config(tmp_path / "deep" / "run"))
    sinks.log(1, {"reward/mean": 0.5})
    sinks.log_samples(1, [group("a"), group("b")])
    assert read_metrics(tmp_path / "deep/run/metrics.jsonl") == {1: {"reward/mean": 0.5}}
    samples = read_samples(tmp_path / "deep/run/samples.jsonl")
    assert [(row["prompt_id"], row["sample_index"]) for row in samples] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    sinks.close()
    sinks.close()


def test_a_sample_says_what_was_asked_answered_read_and_paid() -> None:
    one = group("a")
    assert sample_row(3, one, one.responses[1], one.rewards[1]) == {
        "step": 3,
        "prompt_id": "a",
        "sample_index": 1,
        "prompt": "1+2=\n",
        "response": "Answer: 1",
        "answer": "3",
        "extracted": "1",
        "accuracy": 0.0,
        "reward": -1.25,
        "reward/score": -1.0,
        "reward/overlong": -0.25,
        "reward/format": 0.5,
        "response_tokens": 2,
        "finish_reason": "stop",
        "policy_version": 4,
        "version_spans": [[0, 4], [1, 5]],
    }


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, []),
        (1, [("a", 0)]),
        (2, [("a", 0), ("c", 3)]),
        (4, [("a", 0), ("b", 0), ("b", 3), ("c", 3)]),
        (99, [(name, member) for name in "abc" for member in range(4)]),
    ],
)
def test_samples_are_spread_over_groups_and_members(
    count: int, expected: list[tuple[str, int]]
) -> None:
    picked = spread([group(name, 4) for name in "abc"], count)
    assert [(one.prompt.id, member) for one, member in picked] == expected


def test_going_back_to_an_older_step_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Sinks.open(run_config(tmp_path))
    for step in (199, 200, 201, 202):
        first.log(step, {"loss": 1.0})
    first.close()
    with caplog.at_level(logging.WARNING):
        resumed = Sinks.open(run_config(tmp_path))
        for step in (201, 202, 203):
            resumed.log(step, {"loss": 2.0})
    assert [record.message for record in caplog.records] == [
        "step 201 is logged again after step 202: the run resumed from an older checkpoint. "
        "Readers take the later record."
    ]
    losses = {step: m["loss"] for step, m in read_metrics(tmp_path / "metrics.jsonl").items()}
    assert losses == {199: 1.0, 200: 1.0, 201: 2.0, 202: 2.0, 203: 2.0}


def test_a_full_disk_is_said_once_counted_and_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    sinks = Sinks([JsonLinesSink(tmp_path)], run_dir=tmp_path, samples_per_step=2)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            sinks.log(step, {"loss": 1.0})
            sinks.log_samples(step, [group("a")])
        assert sinks.failures == {"jsonl": 4}
        sinks.finish()
    said = [record.message for record in caplog.records if "No space left" in record.message]
    assert len(said) == 1
    assert "writes that failed: jsonl 5" in caplog.text  # it tried again at the end


def test_a_run_directory_that_cannot_be_made_is_survived(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    sinks = Sinks.open(run_config(tmp_path / "file" / "run"))
    sinks.log(1, {"loss": 1.0})
    assert sinks.failures["jsonl"] == 1
    sinks.finish()


def test_writing_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    sinks = Sinks([JsonLinesSink(tmp_path)], run_dir=tmp_path, samples_per_step=0)
    sinks.log(1, {"loss": 1.0})
    path.unlink()
    sinks.log(2, {"loss": 2.0})
    assert read_metrics(path) == {1: {"loss": 1.0}, 2: {"loss": 2.0}}
    assert sinks.failures == {"jsonl": 1}


def test_tensorboard_gets_every_metric_and_a_resume_purges_what_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, value in (((1, 2, 3), 1.0), ((2, 3), 2.0)):
        sinks = Sinks.open(run_config(tmp_path, tensorboard=True))
        for step in steps:
            sinks.log(step, {"reward/mean": value})
        sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(point.step, point.value) for point in events.Scalars("reward/mean")]
    assert points == [(1, 1.0), (2, 2.0), (3, 2.0)]


@contextmanager
def no_file_grows_beyond(size: int) -> Iterator[None]:
    """A disk that is full, for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_has_every_step_once_a_full_disk_has_room_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoardSink(tmp_path)
    sink.log(1, {"actor/lr": 1.0})
    with no_file_grows_beyond(170):
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                sink.log(step, {"actor/lr": float(step), "reward/mean": 0.5})
    sink.log(4, {"actor/lr": 4.0})
    sink.close(complete=True)
    assert tensorboard_points(tmp_path, "actor/lr") == [(n, float(n)) for n in (1, 2, 3, 4)]
    assert tensorboard_points(tmp_path, "reward/mean") == [(2, 0.5), (3, 0.5)]


def test_tensorboard_reads_what_was_written_before_a_run_was_killed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    child = os.fork()
    if child == 0:
        sink = TensorBoardSink(tmp_path)
        for step in (1, 2, 3):
            sink.log(step, {"actor/lr": float(step)})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (torn,) = tmp_path.iterdir()
    os.truncate(torn, torn.stat().st_size - 5)
    torn.rename(tmp_path / "events.out.tfevents.0000000001")  # names of one second sort by process
    resumed = TensorBoardSink(tmp_path)
    resumed.log(3, {"actor/lr": 30.0})
    resumed.close(complete=True)
    assert tensorboard_points(tmp_path, "actor/lr") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_missing_tracker_is_said_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb raises ImportError
    with caplog.at_level(logging.WARNING):
        sinks = Sinks.open(run_config(tmp_path, wandb=True))
        sinks.log(1, {"loss": 1.0})
    assert [record.message for record in caplog.records if "wandb" in record.message]
    assert read_metrics(tmp_path / "metrics.jsonl") == {1: {"loss": 1.0}}


def test_no_step_is_lost_once_a_full_disk_has_room_again(tmp_path: Path) -> None:
    metrics, disk = tmp_path / "metrics.jsonl", Path("/dev/full")
    sink = JsonLinesSink(tmp_path)
    sink.log(1, {"actor/lr": 1.0})
    content = metrics.read_text()
    metrics.unlink()
    metrics.symlink_to(disk)
    for step in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            sink.log(step, {"actor/lr": float(step)})
    metrics.unlink()
    metrics.write_text(content)
    sink.log(4, {"actor/lr": 4.0})
    assert {step: found["actor/lr"] for step, found in read_metrics(metrics).items()} == {
        1: 1.0,
        2: 2.0,
        3: 3.0,
        4: 4.0,
    }
