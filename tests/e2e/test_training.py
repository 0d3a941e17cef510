"""Whole training runs: layouts, families, exact resume, and what every step must show."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dapo.observability.run_files import METRICS_FILE
from tests.e2e.conftest import LOGGERS, SharedEngine, TrainingRuns
from tests.e2e.runs import CANARY, Run, train
from tests.logging_services import recorded, tensorboard_points

pytestmark = pytest.mark.timeout(3600)  # a test that needs several runs waits for all of them
ENGINE_GAP = 1e-3
"""Largest mean difference of probabilities between trainer and engine; in float32 it is ~1e-8."""
LOGPROB_GAP = 1e-4
"""Largest difference of a log-prob. Random text is so improbable that the other hides a lot."""
CLOCKS = ("timing_s/", "perf/", "rollout/", "filter/put_back", "filter/discarded")
"""Also what was sampled in vain: whatever was finished when the step had its groups."""
QUICK_RUNS = ["qwen2_tied pp2", "qwen2_tied tp2 pp2", "qwen3_moe ep2 dp2"]
SLOW_RUNS = ["qwen2_tied vpp2", "qwen2_tied cp2 kl", "qwen2_tied tp2 ppo"]
SLOW_RUNS += ["qwen3_moe tp2", "qwen3 tp2", "qwen2 dp2"]


@pytest.fixture(params=[*QUICK_RUNS, *(pytest.param(r, marks=pytest.mark.slow) for r in SLOW_RUNS)])
def run(request: pytest.FixtureRequest, training_runs: TrainingRuns) -> Run:
    return training_runs[request.param]


def test_every_step_samples_and_trains_the_same_policy(run: Run) -> None:
    steps = run.metrics
    assert list(steps) == list(range(1, len(steps) + 1))
    for metrics in steps.values():
        assert metrics["training/rollout_probs_diff_mean"] <= ENGINE_GAP
        assert metrics["training/mismatch_max"] <= LOGPROB_GAP
        assert metrics["filter/kept"] == run.config.rollout.prompts_per_step
        assert metrics["actor/skipped_steps"] == 0


def test_every_step_learns(run: Run) -> None:
    for step, metrics in run.metrics.items():
        assert metrics["training/policy_version"] == step
        assert math.isfinite(metrics["actor/grad_norm"])
        assert metrics["actor/grad_norm"] > 0
        # The second update of a step sees the first: ratios left 1.
        assert metrics["actor/ratio_min"] < 1 < metrics["actor/ratio_max"]


def test_the_phases_and_the_rest_add_up_to_the_step(run: Run) -> None:
    phases = {"gen", "adv", "old_log_prob", "update_actor", "weight_sync", "testing", "wait"}
    for metrics in run.metrics.values():
        clocks = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
        step = clocks.pop("timing_s/step")
        assert clocks.keys() >= {f"timing_s/{name}" for name in (*phases, "other")}
        assert min(clocks.values()) >= 0
        assert sum(clocks.values()) == pytest.approx(step, rel=1e-6)


def test_the_exported_folder_loads_and_every_weight_has_moved(run: Run) -> None:
    before = load_file(run.start.model / "model.safetensors")
    after = load_file(run.hf / "model.safetensors")
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    model, report = AutoModelForCausalLM.from_pretrained(run.hf, output_loading_info=True)
    assert {key: list(names) for key, names in report.items() if names} == {}
    with torch.no_grad():
        assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_a_run_leaves_what_people_look_for(run: Run) -> None:
    for name in ("config.resolved.yaml", "versions.json", "samples.jsonl", "report.html"):
        assert (run.folder / name).stat().st_size > 0
    assert (run.folder / "checkpoints" / "latest").read_text() == (f"step_{max(run.metrics):08d}\n")


def test_no_secret_of_the_environment_is_written_anywhere(run: Run) -> None:
    assert CANARY not in run.finished.output
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


def test_held_out_prompts_are_evaluated_before_between_and_after_the_steps(
    training_runs: TrainingRuns,
) -> None:
    records = training_runs["qwen3_moe ep2 dp2"].records
    name = "val-core/heldout/acc/mean@2"
    assert [step for step, record in records.items() if name in record] == [0, 2]
    assert 0 < records[2][name] < 1
    assert records[0][name] <= records[0]["val-core/heldout/acc/best@2"]


@pytest.mark.skipif(LOGGERS != ("wandb", "tensorboard"), reason="wandb or tensorboard is missing")
def test_wandb_and_tensorboard_have_every_number_of_the_run(training_runs: TrainingRuns) -> None:
    run = training_runs["qwen3_moe ep2 dp2"]
    rows: dict[object, dict[str, object]] = {}
    for row in recorded(run.folder):
        rows.setdefault(row["step"], {}).update(row)
    assert list(rows) == list(run.records)
    for step, record in run.records.items():
        assert rows[step].items() >= record.items()
        assert len(record) > 1
        assert ("samples/nrows" in rows[step]) is (step > 0)
    loss = tensorboard_points(run.folder / "tensorboard", "actor/pg_loss")
    expected = [(step, pytest.approx(r["actor/pg_loss"])) for step, r in run.metrics.items()]
    assert loss == expected


@pytest.mark.slow
def test_bfloat16_trains_with_a_small_gap_to_the_engine(training_runs: TrainingRuns) -> None:
    run = training_runs["qwen3 dp2 bf16"]
    assert list(run.metrics) == [1, 2]
    for metrics in run.metrics.values():
        assert 0 < metrics["training/mismatch_mean"] <= 0.05
        assert metrics["training/rollout_probs_diff_mean"] <= ENGINE_GAP
    tensors = load_file(run.hf / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.slow
def test_the_critic_of_ppo_trains_too(training_runs: TrainingRuns) -> None:
    for metrics in training_runs["qwen2_tied tp2 ppo"].metrics.values():
        assert metrics["critic/grad_norm"] > 0
        assert metrics["timing_s/update_critic"] > 0


def test_the_layout_does_not_change_the_first_step(training_runs: TrainingRuns) -> None:
    stages = training_runs["qwen2_tied pp2"].metrics[1]
    shards = training_runs["qwen2_tied tp2 pp2"].metrics[1]
    for name in ("reward/mean", "reward/acc/mean", "response_length/mean", "filter/generated"):
        assert shards[name] == stages[name]
    for name in ("actor/grad_norm", "actor/entropy", "actor/pg_loss", "actor/ratio_max"):
        assert shards[name] == pytest.approx(stages[name], rel=1e-4, abs=1e-6)


def without_clocks(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(CLOCKS)}


@pytest.fixture(scope="module")
def resumed(training_runs: TrainingRuns, shared_engine: SharedEngine) -> Run:
    """A copy of the run of 2 steps, started again with 3."""
    first = training_runs["qwen2_tied pp2"]
    copy = first.folder.with_name("resumed")
    shutil.copytree(first.folder, copy)
    more = ("parallel.pipeline=2", "training.steps=3", shared_engine.override)
    return train(first.start, copy.name, *more)


def test_a_resumed_run_goes_on_exactly(training_runs: TrainingRuns, resumed: Run) -> None:
    straight = training_runs["qwen2_tied pp2 straight"].metrics
    assert list(resumed.metrics) == list(straight) == [1, 2, 3]
    for step in (1, 2, 3):
        there, here = without_clocks(straight[step]), without_clocks(resumed.metrics[step])
        assert here == pytest.approx(there, rel=1e-6, abs=1e-9)


def test_a_resumed_run_repeats_no_step(resumed: Run) -> None:
    assert len((resumed.folder / METRICS_FILE).read_text().splitlines()) == 3
    assert "step_00000002" in resumed.finished.output


def test_the_resumed_and_the_straight_run_end_with_the_same_weights(
    training_runs: TrainingRuns, resumed: Run
) -> None:
    straight = load_file(training_runs["qwen2_tied pp2 straight"].hf / "model.safetensors")
    again = load_file(resumed.hf / "model.safetensors")
    assert max((straight[name] - again[name]).abs().max().item() for name in straight) <= 1e-7


def test_a_complete_run_started_again_says_so_and_starts_no_engine(
    training_runs: TrainingRuns,
) -> None:
    run = training_runs["qwen2_tied pp2"]
    watched = [run.folder / METRICS_FILE, *(run.folder / "logs").glob("rollout_engine*")]
    assert len(watched) == 2
    before = [path.read_bytes() for path in watched]
    again = train(run.start, run.folder.name, "parallel.pipeline=2")
    assert "already complete" in again.finished.output
    assert [path.read_bytes() for path in watched] == before
