"""`eval` from its arguments to its files, with an engine that has no model."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megatron_dapo.checkpoint.commit import commit, unfinished_folder
from megatron_dapo.checkpoint.completion import EXPORTED
from megatron_dapo.checkpoint.durable_files import FileRecord
from megatron_dapo.cli import eval as command
from megatron_dapo.cli.eval_target import find_target
from megatron_dapo.cli.main import main
from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.config.load import save_resolved
from megatron_dapo.observability.run_files import read_lines, write_run_record
from megatron_dapo.rollout.engine import EngineUnavailable
from megatron_dapo.rollout.vllm_server import EngineStartError
from tests.unit.config.runs import DENSE, write_run
from tests.unit.data.word_tokenizer import WordTokenizer
from tests.unit.rollout.fake_engine import FakeEngine

ROWS: dict[str, list[dict[str, object]]] = {
    "sums": [{"prompt": f"{n} + 0", "reward_model": {"ground_truth": "7"}} for n in range(3)],
    "gsm8k": [{"question": "two and five", "answer": "2 + 5 = 7\n#### 7"}],
}


class Tokenizer(WordTokenizer):
    """Reads an answer into what the engine without a model says."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "Answer: 7" if 7 in token_ids else "wait ... Answer: 8"


class Engines:
    """Stands in for servers: remembers what was served, and that it was closed."""

    served: ClassVar[list[tuple[RunConfig, Path]]] = []
    failure: Exception | None = None
    left = 0

    def __init__(self, config: RunConfig, folder: Path, device: str) -> None:
        assert (folder / "config.json").is_file()
        Engines.served.append((config, folder))
        self.engines = [FakeEngine()]

    def __enter__(self) -> Engines:
        if Engines.failure is not None:
            raise Engines.failure
        return self

    def __exit__(self, *error: object) -> None:
        Engines.left += 1

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "LoadedEngines", Engines)
    monkeypatch.setattr(command, "load_tokenizer", lambda path, **options: Tokenizer())
    monkeypatch.setattr(Engines, "served", [])
    monkeypatch.setattr(Engines, "failure", None)
    monkeypatch.setattr(Engines, "left", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration with two sets."""
    run = write_run(tmp_path, hf=DENSE | {"eos_token_id": 2})
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return run


def sets(folder: Path) -> list[str]:
    return [
        *(f"evaluation.sets.{name}.path={folder / name}.jsonl" for name in ROWS),
        *("evaluation.samples_per_prompt=4", "data.prompt_format=plain"),
    ]


def evaluate(*arguments: object) -> int:
    return main(["eval", *map(str, arguments)])


def test_a_configuration_evaluates_its_model(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(file, *sets(tmp_path)) == 0
    out = tmp_path / "run" / "eval" / "start"
    report = json.loads((out / "report.json").read_text())
    rows = read_lines(out / "samples.jsonl")
    assert report["weights"] == str(tmp_path / "model")
    assert list(report["sets"]) == ["sums", "gsm8k"]
    for name, found in report["sets"].items():
        own = [row for row in rows if row["set"] == name]
        counts = found["result"]["counts"]
        assert counts["samples"] == len(own) == 4 * len(ROWS[name])
        assert counts["right"] == sum(row["accuracy"] == 1.0 for row in own)
        assert counts["tokens"] == sum(int(str(row["response_tokens"])) for row in own)
        assert found["result"]["avg"]["value"] == counts["right"] / counts["samples"]
        assert found["protocol"]["samples_per_prompt"] == 4
    printed = capsys.readouterr().out
    sums = report["sets"]["sums"]["result"]
    assert f"{sums['counts']['right']}/12" in printed
    assert str(out / "report.json") in printed
    assert Engines.left == 1
    ((config, folder),) = Engines.served
    assert (config.run_dir, folder) == (out, tmp_path / "model")


def test_the_same_command_finds_the_same(tmp_path: Path, file: Path) -> None:
    for name in ("a", "b"):
        assert evaluate(file, *sets(tmp_path), "--out", tmp_path / name) == 0
    first, second = ((tmp_path / n / "samples.jsonl").read_text() for n in ("a", "b"))
    assert first == second
    assert evaluate(file, *sets(tmp_path), "seed=1", "--out", tmp_path / "c") == 0
    assert (tmp_path / "c" / "samples.jsonl").read_text() != first


def test_only_the_chosen_sets_are_sampled(tmp_path: Path, file: Path) -> None:
    assert evaluate(file, "--sets", "gsm8k", *sets(tmp_path), "--out", tmp_path / "o") == 0
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert list(report["sets"]) == ["gsm8k"]


def test_an_evaluation_that_is_there_is_not_overwritten(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(file, *sets(tmp_path)) == 0
    assert evaluate(file, *sets(tmp_path)) == 78
    assert "holds an evaluation already" in capsys.readouterr().err
    assert len(Engines.served) == 1


REFUSED = [
    (("evaluation.sets={}",), "nothing to evaluate"),
    (("--sets", "sums,aime"), "--sets 'aime': no such set; sets are sums, gsm8k"),
    (("rollout.engine_quantization=fp8",), "eval serves a folder as it is"),
    (("rollout.max_response_tokens=1000",), "more than the 512 positions"),
    (("rollout.engine_tensor=3",), "must divide the model's 4 attention heads"),
    (("evaluation.sets.sums.path=absent.jsonl",), "evaluation.sets.sums.path="),
    (("evaluation.sets.sums.pth=x",), "Did you mean evaluation.sets.sums.path?"),
    (("evaluation.sets.sums.temperature=0",), "evaluation.samples_per_prompt=4: at "),
    (("device=cuda",), "no CUDA device is visible"),
    (("--config", "other.yaml"), "has a configuration of its own"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_evaluated_starts_no_engine(
    tmp_path: Path,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    given = [] if arguments[0] == "evaluation.sets={}" else sets(tmp_path)
    assert evaluate(file, *given, *arguments) == 78
    answer = capsys.readouterr().err
    assert message in answer
    assert "Traceback" not in answer
    assert Engines.served == []


@pytest.mark.parametrize("failure", [EngineStartError("ended early"), EngineUnavailable("lost")])
def test_engines_that_fail_are_one_message_and_exit_code_1(
    tmp_path: Path,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
) -> None:
    monkeypatch.setattr(Engines, "failure", failure)
    assert evaluate(file, *sets(tmp_path)) == 1
    assert capsys.readouterr().err.endswith(f"evaluation failed: {failure}\n")
    assert not (tmp_path / "run" / "eval" / "start" / "report.json").exists()


def test_ctrl_c_closes_the_engines(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(engines: Engines, work: Coroutine[Any, Any, Any]) -> Any:
        work.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Engines, "run", interrupted)
    assert evaluate(file, *sets(tmp_path)) == 130
    assert Engines.left == 1


def write_checkpoint(run_dir: Path, step: int) -> Path:
    building = unfinished_folder(run_dir / "checkpoints", step)
    building.mkdir(parents=True)
    (building / "state.json").write_text("{}")
    record = FileRecord(bytes=2, sha256="0" * 64)
    return commit(run_dir / "checkpoints", step, {"state.json": record})


@pytest.fixture
def run_dir(tmp_path: Path, file: Path) -> Path:
    config = load_config(file, sets(tmp_path))
    save_resolved(config, config.run_dir)
    write_checkpoint(config.run_dir, 10)
    write_checkpoint(config.run_dir, 20)
    return config.run_dir


def export_to(folder: Path, *, step: int) -> None:
    """What a run leaves whose last step was this."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DENSE | {"eos_token_id": 2}))
    write_run_record(folder.parent, {EXPORTED: str(step)})


def test_a_run_is_its_export_when_that_is_of_the_newest_step(run_dir: Path) -> None:
    export_to(run_dir / "hf", step=20)
    os.utime(run_dir / "hf" / "config.json", (0, 0))  # a copy has other times
    for path in (run_dir, run_dir / "hf"):
        target = find_target(path, [], config_file=None, out=None)
        assert (target.folder, target.step) == (run_dir / "hf", 20)
        assert target.config.run_dir.parent == run_dir / "eval"


def test_an_older_export_is_not_taken_for_the_newest_step(run_dir: Path) -> None:
    export_to(run_dir / "hf", step=10)
    target = find_target(run_dir, [], config_file=None, out=None)
    assert (target.folder, target.checkpoint) == (None, run_dir / "checkpoints" / "step_00000020")
    assert target.source == target.checkpoint
    assert find_target(run_dir / "hf", [], config_file=None, out=None).step == 10
    (run_dir / "hf").rename(run_dir / "other")
    assert find_target(run_dir / "other", [], config_file=None, out=None).step == 0


@pytest.mark.parametrize("told", ["", "ten", "-3", "2.5", "9" * 5000])
def test_an_export_of_a_step_that_nobody_can_read_is_of_none(run_dir: Path, told: str) -> None:
    export_to(run_dir / "hf", step=20)
    write_run_record(run_dir, {EXPORTED: told})
    assert find_target(run_dir / "hf", [], config_file=None, out=None).step == 0
    assert find_target(run_dir, [], config_file=None, out=None).folder is None


def test_a_step_is_evaluated_by_its_name(run_dir: Path) -> None:
    step = run_dir / "checkpoints" / "step_00000010"
    target = find_target(step, ["seed=3"], config_file=None, out=None)
    assert (target.folder, target.checkpoint, target.step) == (None, step, 10)
    assert target.config.seed == 3
    assert target.config.run_dir == run_dir / "eval" / "step_00000010"


def test_a_checkpoint_is_exported_into_a_folder_that_goes_away(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(checkpoint: Path, config: RunConfig, out: Path) -> None:
        assert config.model.path == run_dir.parent / "model"
        out.mkdir()
        (out / "config.json").write_text(checkpoint.name)

    monkeypatch.setattr(command, "export_checkpoint", export)
    assert evaluate(run_dir) == 0
    ((_, folder),) = Engines.served
    assert not folder.parent.exists()
    out = run_dir / "eval" / "step_00000020"
    assert json.loads((out / "report.json").read_text())["step"] == 20
    kept = {"config.resolved.yaml", "versions.json", "report.json", "samples.jsonl"}
    assert {path.name for path in out.iterdir()} == kept


def test_a_model_folder_of_no_run_takes_defaults_or_a_configuration(
    tmp_path: Path, file: Path
) -> None:
    alone = find_target(tmp_path / "model", ["seed=4"], config_file=None, out=None)
    assert (alone.folder, alone.config.seed) == (tmp_path / "model", 4)
    assert alone.config.model.dtype == "bfloat16"
    assert alone.config.evaluation.samples_per_prompt == 32
    assert alone.config.run_dir == tmp_path / "eval" / "model"
    given = find_target(tmp_path / "model", [], config_file=file, out=tmp_path / "o")
    assert given.config.rollout.max_response_tokens == 64
    assert given.config.run_dir == tmp_path / "o"


def test_what_is_nothing_to_evaluate_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: give a YAML file, a run directory"):
        find_target(tmp_path / "absent", [], config_file=None, out=None)
    with pytest.raises(ConfigError, match="is an empty folder: give a YAML file, a run directory"):
        find_target(tmp_path, [], config_file=None, out=None)


def test_responses_that_no_grader_took_are_told(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = "reward.plugin=tests.unit.reward.plugins:echo"
    assert evaluate(file, *sets(tmp_path), plugin, "reward.workers=1") == 0
    told = capsys.readouterr().err
    assert "sums: 12 of 12 responses were not graded and count as wrong" in told
    assert "could not convert string to float" in told


def test_a_limit_of_tokens_below_the_overlong_buffer_of_training_may_be_evaluated(
    tmp_path: Path, file: Path
) -> None:
    shorter = ("rollout.max_response_tokens=8", "reward.overlong_buffer_tokens=16")
    assert evaluate(file, *sets(tmp_path), *shorter) == 0
    rows = read_lines(tmp_path / "run" / "eval" / "start" / "samples.jsonl")
    assert {row["reward/overlong"] for row in rows} == {0.0}
