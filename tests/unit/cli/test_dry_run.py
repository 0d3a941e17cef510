"""The dry run prints what would run, for this machine or for another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.cli.dry_run import in_words
from megatron_dapo.cli.main import main
from tests.conftest import REPOSITORY
from tests.unit.config.runs import DENSE, write_run

SHIPPED = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for folder in ("qwen32b", "qwen3_30b_a3b")
    for path in (REPOSITORY / "examples" / folder).rglob("*.yaml")
    if path.name != "cpu_smoke.yaml"  # starts from what examples/quickstart/prepare.py writes
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", *arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("file", SHIPPED)
def test_every_shipped_configuration_passes_without_weights(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("MODEL", raising=False)
    text = dry_run(capsys, file)
    assert "The configuration is sound." in text
    assert "warning: device=cuda: no CUDA device is visible" in text
    assert "holds no .safetensors weights" in text.replace("\n", " ")


@pytest.mark.parametrize("name", sorted((REPOSITORY / "examples/quickstart").glob("*.yaml")))
def test_the_quickstart_passes_once_its_model_is_there(
    name: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    model, prompts = tmp_path / "model", tmp_path / "train.jsonl"
    paths = [f"model.path={model}", f"model.tokenizer={model}"]
    paths += [f"data.train={prompts}", f"data.heldout={prompts}"]
    assert "The configuration is sound." in dry_run(capsys, str(name), *paths)


def test_the_papers_batches_and_ranks_are_spelled_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    text = dry_run(capsys, "examples/qwen32b/dapo.yaml")
    assert "512 prompts x 16 responses = 8,192 responses" in text
    assert "16 updates of 512 responses" in text
    assert "128 trainer ranks on 16 nodes" in text
    assert "120-127" in text
    assert "32,763,417,600 parameters" in text
    assert "152,576" in text


def test_a_small_run_lists_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, str(write_run(tmp_path)), "parallel.tensor=2", "parallel.pipeline=2")
    assert "4 trainer ranks on 1 nodes" in text
    rows = [line for line in text.splitlines() if line.startswith("│ 0    │")]
    assert len(rows) == 4


def test_remarks_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, str(write_run(tmp_path)), "training.responses_per_update=64")
    assert "note: One update a step" in text


ROWS = [{"prompt": f"{n} + 1", "reward_model": {"ground_truth": "2"}} for n in range(99)]
LINES = tuple(json.dumps(row) + "\n" for row in ROWS)
FEW = "note: rollout.prompts_per_step=8: data.train="


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("rows", "known"),
    [(LINES[:8], None), (LINES[:7], 7), (LINES[:1] * 50 + LINES[1:4], 4), (LINES * 2, None)],
    ids=["as many", "one too few", "repeated", "more"],
)
def test_a_step_of_more_prompts_than_there_are_is_remarked_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: tuple[str, ...], known: int | None
) -> None:
    file = write_run(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(rows))
    text = unwrapped(dry_run(capsys, str(file)))
    assert (FEW in text) == (known is not None)
    if known is not None:
        assert f"has {known} prompts. An epoch passes in every step" in text


def test_repeated_rows_count_where_they_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    (tmp_path / "train.jsonl").write_text(LINES[0] * 8)
    assert FEW in unwrapped(dry_run(capsys, str(file)))
    assert FEW not in unwrapped(dry_run(capsys, str(file), "data.deduplicate=false"))


def test_a_training_file_without_a_row_is_remarked_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    assert "note: data.train cannot be used: " in dry_run(capsys, str(file))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 thousand"),
        (49_152, "49.2 thousand"),
        (999_499, "999 thousand"),
        (999_500, "1 million"),
        (3_690_000, "3.69 million"),
        (999_600_000, "1 billion"),
        (73_819_750_400, "73.8 billion"),
        (4 * 10**12, "4 trillion"),
    ],
)
def test_large_numbers_are_told_in_words(count: int, words: str) -> None:
    assert in_words(count) == words


def test_a_small_run_tells_its_tokens_in_a_fitting_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = dry_run(capsys, str(write_run(tmp_path)), "training.steps=2")
    assert "2 steps, 8 updates, at most 12.3 thousand tokens" in text


def test_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    dry_run(capsys, str(file))
    assert sorted(tmp_path.rglob("*")) == before


def test_what_this_machine_lacks_is_an_error_for_a_run_on_it(tmp_path: Path) -> None:
    file = write_run(tmp_path, weights=False)
    assert main(["train", str(file), "--dry-run"]) == 78
    assert main(["train", str(file), "device=cuda", "--dry-run"]) == 0


def test_a_broken_rule_is_an_error_for_another_machine_too(tmp_path: Path) -> None:
    file = write_run(tmp_path, weights=False)
    assert main(["train", str(file), "device=cuda", "parallel.tensor=3", "--dry-run"]) == 78


def test_output_is_the_same_in_a_pipe(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "train", str(write_run(tmp_path))]
    done = subprocess.run([*command, "--dry-run"], capture_output=True, check=True)
    assert max(len(line) for line in done.stdout.decode().splitlines()) <= 110


def test_weights_that_cannot_be_read_are_refused_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    file = write_run(tmp_path, hf=DENSE | quantized)
    assert main(["train", str(file), "--dry-run"]) == 78
    assert "quantization_config={'quant_method': 'gptq', 'bits': 4}" in capsys.readouterr().err
