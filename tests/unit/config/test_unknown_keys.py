"""A key that does not exist is answered with the one that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.keys import documented_keys, nearest_key
from tests.unit.config.runs import write_run

MEANT = {
    "loss.clip_hihg": "loss.clip_high",
    "loss.cliplow": "loss.clip_low",
    "loss.clip_ratio_high": "loss.clip_high",
    "loss.agregation": "loss.aggregation",
    "loss.objektive": "loss.objective",
    "optimiser.lr": "optimizer.lr",
    "training.lr": "optimizer.lr",
    "lr": "optimizer.lr",
    "critc.lr": "critic.lr",
    "trainig.steps": "training.steps",
    "optimizer.learning_rate": "optimizer.lr",
    "optimizer.warm_up_steps": "optimizer.warmup_steps",
    "optimizer.weight_deacy": "optimizer.weight_decay",
    "rollout.groupsize": "rollout.group_size",
    "training.group_size": "rollout.group_size",
    "group_size": "rollout.group_size",
    "rollout.temprature": "rollout.temperature",
    "rollout.max_responce_tokens": "rollout.max_response_tokens",
    "data.max_response_tokens": "rollout.max_response_tokens",
    "rollout.max_prompt_tokens": "data.max_prompt_tokens",
    "rolout": "rollout",
    "training.ppo_mini_batch_size": "training.responses_per_update",
    "rollout.responses_per_update": "training.responses_per_update",
    "training.tokens_per_microbatch": "training.tokens_per_micro_batch",
    "parallel.tensor_model_parallel_size": "parallel.tensor",
    "parallel.tensors": "parallel.tensor",
    "parallel.pipline": "parallel.pipeline",
    "parallel.experts": "parallel.expert",
    "precision.fp_8": "precision.fp8",
    "reward.overlong_buffer": "reward.overlong_buffer_tokens",
    "overlong_buffer_tokens": "reward.overlong_buffer_tokens",
    "sampling.max_round": "sampling.max_rounds",
    "checkpoint.evry": "checkpoint.every",
    "evaluation.sample_per_prompt": "evaluation.samples_per_prompt",
    "logging.wandb_projekt": "logging.wandb_project",
    "model.dtyp": "model.dtype",
    "sed": "seed",
    "rundir": "run_dir",
}


@pytest.mark.parametrize(("unknown", "meant"), MEANT.items())
def test_the_nearest_key_is_the_one_that_was_meant(unknown: str, meant: str) -> None:
    assert nearest_key(unknown) == meant


@pytest.mark.parametrize("unknown", ["loss.clip_hihg", "group_size"])
def test_files_and_overrides_answer_alike(tmp_path: Path, unknown: str) -> None:
    file = write_run(tmp_path)
    with pytest.raises(ConfigError) as from_override:
        load_config(file, [f"{unknown}=1"])
    section, _, key = unknown.rpartition(".")
    file.write_text(file.read_text() + (f"{section}:\n  {key}: 1\n" if section else f"{key}: 1\n"))
    with pytest.raises(ConfigError) as from_file:
        load_config(file)
    for raised in (from_override, from_file):
        assert f"unknown config key {unknown} in " in str(raised.value)
        assert str(raised.value).endswith(f"Did you mean {MEANT[unknown]}?")


def test_nothing_near_lists_the_sections(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Top-level keys: run_dir, seed"):
        load_config(write_run(tmp_path), ["zzzqqq=1"])


def test_a_secret_is_refused_without_repeating_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(write_run(tmp_path), ["logging.wandb_api_key=hunter2canary"])
    assert "environment or netrc" in str(raised.value)
    assert "hunter2canary" not in str(raised.value)


def test_every_key_is_documented() -> None:
    assert [key for key, text in documented_keys().items() if not text] == []
