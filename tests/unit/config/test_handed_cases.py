"""Handed cases about configuration: what is accepted, what is refused, what is counted."""

from __future__ import annotations

import pytest

from megatron_dapo.config import ConfigError, RunConfig, check_config
from tests.unit.config.runs import DENSE
from tests.unit.handed import Case, handed_cases

OURS = {
    "train_prompts": "rollout.prompts_per_step",
    "group_size": "rollout.group_size",
    "mini_batch_samples": "training.responses_per_update",
    "refill_prompts": "sampling.prompts_per_round",
    "max_prompt_tokens": "data.max_prompt_tokens",
    "max_response_tokens": "rollout.max_response_tokens",
    "overlong_cache_tokens": "reward.overlong_buffer_tokens",
    "engine_max_len": "rollout.max_engine_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "engine_logprobs": "rollout.logprobs",
}
CHECKED = [p for kind in "dio" for p in handed_cases(kind) if p.values[0]["op"] == "check_config"]


def adapt(words: dict[str, object]) -> RunConfig:
    """Neutral words -> our keys; one update a step unless the case says otherwise."""
    tree: dict[str, dict[str, object]] = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    for word, value in words.items():
        section, key = OURS[word].split(".")
        tree.setdefault(section, {})[key] = value
    rollout = {"prompts_per_step": 512, "group_size": 16} | tree.get("rollout", {})
    responses = rollout["prompts_per_step"] * rollout["group_size"]
    tree["training"] = {"responses_per_update": responses} | tree.get("training", {})
    return RunConfig.model_validate({"run_dir": "r", **tree})


@pytest.mark.parametrize("case", CHECKED)
def test_configurations_are_accepted_or_refused_by_name(case: Case) -> None:
    config = adapt(case["input"]["config"])
    hf_config = DENSE | {"max_position_embeddings": 131072}
    if case["expect"]["accept"]:
        check_config(config, hf_config)
        return
    with pytest.raises(ConfigError) as raised:
        check_config(config, hf_config)
    assert len(raised.value.problems) == 1
    assert any(name in str(raised.value) for name in case["expect"]["message_names"])


@pytest.mark.parametrize("case", handed_cases("b", "count_updates"))
def test_updates_of_a_step_are_counted_in_responses(case: Case) -> None:
    given = case["input"]
    config = RunConfig.model_validate(
        {
            "run_dir": "r",
            "model": {"path": "m"},
            "data": {"train": "t.jsonl"},
            "training": {
                "responses_per_update": given["mini_batch_samples"],
                "epochs": given["epochs"],
            },
            "rollout": {
                "prompts_per_step": given["prompts_per_rollout"],
                "group_size": given["group_size"],
            },
        }
    )
    assert config.updates_per_step == case["expect"]["updates"]
