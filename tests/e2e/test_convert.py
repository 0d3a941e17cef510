"""Weights between formats: converted shards, exported folders, and who can read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import GREEDY_TOKENS, SharedEngine, TrainingRuns, greedy_prompts
from tests.e2e.runs import Run, Start, command, train
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.timeout(3600)  # a test that needs several runs waits for all of them


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_bits(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> None:
    assert set(here) == set(there)
    for name, tensor in here.items():
        assert tensor.dtype == there[name].dtype
        assert torch.equal(tensor.view(torch.uint8), there[name].view(torch.uint8)), name


@pytest.fixture(scope="module")
def pipeline_run(training_runs: TrainingRuns) -> Run:
    return training_runs["qwen2_tied pp2"]


def test_exporting_the_last_checkpoint_gives_the_folder_of_the_run(
    pipeline_run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    done = command("export", pipeline_run.folder, out)
    assert (done.code, done.out) == (0, f"{out}\n")
    assert_same_bits(weights(out), weights(pipeline_run.hf))
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in pipeline_run.hf.iterdir()}
    for name in names - {"model.safetensors"}:
        assert (out / name).read_bytes() == (pipeline_run.hf / name).read_bytes()


def test_export_overwrites_nothing(pipeline_run: Run) -> None:
    done = command("export", pipeline_run.folder, pipeline_run.hf)
    assert done.code == 78
    assert f"OUT={pipeline_run.hf} exists" in done.err


def test_vllm_and_transformers_continue_alike_from_an_exported_folder(
    pipeline_run: Run, shared_engine: SharedEngine
) -> None:
    """The shared engine started from the exported folder; `answers` are its first words."""
    model = AutoModelForCausalLM.from_pretrained(pipeline_run.hf).eval()
    for prompt, answer in zip(greedy_prompts(), shared_engine.answers, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=GREEDY_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert expected[0, len(prompt) :].tolist() == list(answer)


def test_the_tokenizer_of_the_run_comes_along(pipeline_run: Run) -> None:
    for file in (pipeline_run.start.folder / "tokenizer").iterdir():
        assert (pipeline_run.hf / file.name).read_bytes() == file.read_bytes()


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not the weights of any run."""
    folder = tmp_path_factory.mktemp("other") / "model"
    save_tiny_model(folder, "qwen2_tied", seed=77, pad_token_id=None)
    return folder


@pytest.fixture(scope="module")
def converted(other_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "shards"
    done = command("convert", other_model, out, "parallel.tensor=2")
    assert (done.code, done.out) == (0, f"{out}\n")
    return out


def test_weights_come_back_from_shards_bit_by_bit(
    other_model: Path, converted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "back"
    done = command("export", converted, out)
    assert (done.code, done.out) == (0, f"{out}\n")
    assert_same_bits(weights(out), weights(other_model))
    here, there = (json.loads((f / "config.json").read_text()) for f in (out, other_model))
    assert here == there


def test_a_run_starts_from_converted_shards(
    pipeline_run: Run, other_model: Path, converted: Path, shared_engine: SharedEngine
) -> None:
    """`model.path` holds other weights; a learning rate of almost nothing keeps the shards'."""
    start = Start(pipeline_run.start.folder)
    still = ("training.steps=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0")
    run = train(start, str(converted), *still, shared_engine.override)
    assert list(run.metrics) == [1]
    assert run.metrics[1]["training/rollout_probs_diff_mean"] <= 1e-6
    there = weights(other_model)
    for name, tensor in weights(run.hf).items():
        torch.testing.assert_close(tensor, there[name], rtol=0, atol=1e-9)
