"""Rules between keys: each broken rule gives one message that names its key."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from megatron_dapo.batch.packing import pad_multiple
from megatron_dapo.config import ConfigError, check_config
from megatron_dapo.config.layout_checks import pack_multiple
from megatron_dapo.config.remarks import remarks
from tests.unit.config.runs import DENSE, MOE, make_config

CISPO = {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0}
GSPO = {"ratio": "sequence", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4}
FP8 = {"fp8": "blockwise"}
QUANTIZED = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
SMOLLM2: Mapping[str, object] = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
"""config.json of SmolLM2-135M, without the keys of generation."""
Sections = Mapping[str, Mapping[str, object]]

BROKEN: list[tuple[str, Sections, Mapping[str, object]]] = [
    ("model_type='gemma3'", {}, DENSE | {"model_type": "gemma3"}),
    ("hidden_act='gelu'", {}, DENSE | {"hidden_act": "gelu"}),
    ("attention_bias=True", {}, DENSE | {"attention_bias": True}),
    ("use_sliding_window=True", {}, DENSE | {"use_sliding_window": True}),
    ("'type': 'yarn'", {}, DENSE | {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ("quantization_config={'quant_method': 'fp8'", {}, DENSE | QUANTIZED),
    ("parallel.tensor=2", {"parallel": {"tensor": 2}}, SMOLLM2),
    ("rollout.group_size=1", {"rollout": {"group_size": 1, "prompts_per_step": 64}}, DENSE),
    ("training.responses_per_update=24", {"training": {"responses_per_update": 24}}, DENSE),
    ("training.responses_per_update=4", {"training": {"responses_per_update": 4}}, DENSE),
    (
        "parallel.data",
        {"training": {"responses_per_update": 8}, "parallel": {"data": 16}},
        DENSE,
    ),
    ("rollout.max_engine_tokens=95", {"rollout": {"max_engine_tokens": 95}}, DENSE),
    ("512 positions", {"rollout": {"max_response_tokens": 481}}, DENSE),
    ("rollout.max_engine_tokens=513", {"rollout": {"max_engine_tokens": 513}}, DENSE),
    (
        "training.tokens_per_micro_batch=95",
        {"training": {"tokens_per_micro_batch": 95}},
        DENSE,
    ),
    ("reward.overlong_buffer_tokens=65", {"reward": {"overlong_buffer_tokens": 65}}, DENSE),
    ("rollout.temperature=0.0", {"rollout": {"temperature": 0}}, DENSE),
    ("rollout.temperature=0.005", {"rollout": {"temperature": 0.005}}, DENSE),
    ("evaluation.temperature=0.005", {"evaluation": {"temperature": 0.005}}, DENSE),
    ("rollout.top_p=0.9", {"rollout": {"top_p": 0.9}}, DENSE),
    ("rollout.top_k=50", {"rollout": {"top_k": 50}}, DENSE),
    ("rollout.logprobs=raw", {"rollout": {"logprobs": "raw", "temperature": 0.7}}, DENSE),
    (
        "sampling.prompts_per_round=4",
        {"sampling": {"dynamic": False, "prompts_per_round": 4}},
        DENSE,
    ),
    (
        "evaluation.samples_per_prompt=32",
        {"evaluation": {"temperature": 0}, "data": {"heldout": "h.jsonl"}},
        DENSE,
    ),
    ("reward.correct=-1.0", {"reward": {"correct": -1}}, DENSE),
    ("advantage.gamma=0.9", {"advantage": {"gamma": 0.9}}, DENSE),
    ("advantage.lam=0.95", {"advantage": {"lam": 0.95}}, DENSE),
    ("advantage.eps=0.0", {"advantage": {"estimator": "gae", "eps": 0}}, DENSE),
    (
        "advantage.normalize_std=False",
        {"advantage": {"estimator": "gae", "normalize_std": False}},
        DENSE,
    ),
    ("critic: read only with", {"critic": {"lr": 1e-4}}, DENSE),
    (
        "sampling.dynamic=true",
        {
            "advantage": {"estimator": "gae"},
            "rollout": {"group_size": 1, "prompts_per_step": 64},
        },
        DENSE,
    ),
    ("reward.plugin", {"reward": {"plugin": "my_rewards.grade"}}, DENSE),
    ("reward.math_verify=true", {"reward": {"plugin": "a.b:c", "math_verify": True}}, DENSE),
    (
        "reward.math_verify=true",
        {"reward": {"style": "dapo_reference", "math_verify": True}},
        DENSE,
    ),
    ("reward.plugin_network=True", {"reward": {"plugin_network": True}}, DENSE),
    ("reward.plugin_environment=", {"reward": {"plugin_environment": ["A"]}}, DENSE),
    ("loss.clip_low=0.3", {"loss": {"clip_low": 0.3}}, DENSE),
    ("loss.clip_low=1.0", {"loss": {"clip_low": 1, "clip_high": 2}}, DENSE),
    ("loss.dual_clip=1.1", {"loss": {"dual_clip": 1.1}}, DENSE),
    (
        "loss.clip_low=0.2 and",
        {"loss": {"ratio": "sequence", "aggregation": "sequence_mean"}},
        DENSE,
    ),
    ("loss.aggregation=token_mean", {"loss": GSPO | {"aggregation": "token_mean"}}, DENSE),
    ("loss.objective=cispo", {"loss": GSPO | {"objective": "cispo"}}, DENSE),
    ("loss.dual_clip=3.0", {"loss": GSPO | {"dual_clip": 3}}, DENSE),
    ("loss.dual_clip=3.0", {"loss": CISPO | {"dual_clip": 3}}, DENSE),
    ("loss.objective=cispo needs", {"loss": {"objective": "cispo", "clip_high": 4.0}}, DENSE),
    (
        "loss.objective=cispo needs",
        {"loss": {"objective": "cispo", "clip_low": 0.2, "clip_high": 0.28}},
        DENSE,
    ),
    ("loss.clip_low=50.0", {"loss": CISPO | {"clip_low": 50}}, DENSE),
    ("mismatch=geometric needs", {"loss": {"mismatch": "geometric"}}, DENSE),
    ("mismatch=icepop needs", {"loss": {"mismatch": "icepop", "mismatch_high": 5}}, DENSE),
    ("loss.mismatch_high=3.0", {"loss": {"mismatch_high": 3}}, DENSE),
    ("loss.mismatch_low=0.5", {"loss": {"mismatch": "tis_token", "mismatch_low": 0.5}}, DENSE),
    ("loss.kl_estimator=k1", {"loss": {"kl_estimator": "k1"}}, DENSE),
    ("moe.aux_loss_coef=0.01", {"moe": {"aux_loss_coef": 0.01}}, DENSE),
    ("loss.constant_tokens is not set", {"loss": {"aggregation": "constant"}}, DENSE),
    ("loss.constant_tokens=64", {"loss": {"constant_tokens": 64}}, DENSE),
    ("loss.mismatch_low=0.0 and", {"loss": {"mismatch": "icepop", "mismatch_high": 0.5}}, DENSE),
    ("rollout.engine_tensor=3", {"rollout": {"engine_tensor": 3}}, DENSE),
    ("rollout.engines=1", {"rollout": {"endpoints": ["unix:/a", "unix:/b"]}}, DENSE),
    (
        "rollout.heartbeat_timeout_seconds=8",
        {"rollout": {"heartbeat_timeout_seconds": 8.0}},
        DENSE,
    ),
    ("given twice", {"rollout": {"endpoints": ["unix:/a"] * 2, "engines": 2}}, DENSE),
    ("'http://10.0.0.7:8000'", {"rollout": {"endpoints": ["http://10.0.0.7:8000"]}}, DENSE),
    ("'http://0.0.0.0:8000'", {"rollout": {"endpoints": ["http://0.0.0.0:8000"]}}, DENSE),
    ("'unix:relative'", {"rollout": {"endpoints": ["unix:relative"]}}, DENSE),
    ("'http://127.0.0.1:port'", {"rollout": {"endpoints": ["http://127.0.0.1:port"]}}, DENSE),
    ("parallel.tensor=3", {"parallel": {"tensor": 3}}, DENSE),
    ("2 key-value heads", {"parallel": {"tensor": 4}}, DENSE),
    ("parallel.sequence_parallel=true", {"parallel": {"sequence_parallel": True}}, DENSE),
    ("parallel.pipeline=3", {"parallel": {"pipeline": 3}}, DENSE),
    (
        "x parallel.virtual_pipeline=4 = 8",
        {"parallel": {"pipeline": 2, "virtual_pipeline": 4}},
        DENSE,
    ),
    ("parallel.pipeline >= 2", {"parallel": {"virtual_pipeline": 2}}, DENSE),
    ("parallel.expert=2", {"parallel": {"expert": 2, "data": 2}}, DENSE),
    ("parallel.expert=3", {"parallel": {"expert": 3, "data": 3}}, MOE),
    ("parallel.expert=4 x", {"parallel": {"expert": 4, "data": 2}}, MOE),
    (
        "parallel.sequence_parallel=false",
        {"parallel": {"tensor": 2, "sequence_parallel": False}},
        MOE,
    ),
    (
        "training.tokens_per_micro_batch=510",
        {"training": {"tokens_per_micro_batch": 510}, "parallel": {"context": 2}},
        DENSE,
    ),
    ("parallel.nodes=3", {"parallel": {"nodes": 3}}, DENSE),
    ("precision.fp8_param_gather=true", {"precision": {"fp8_param_gather": True}}, DENSE),
    ("needs device=cuda", {"precision": FP8}, DENSE),
    ("auto_map", {}, DENSE | {"auto_map": {"AutoModel": "modeling.Mine"}}),
    ("data.train=", {"data": {"train": "train.csv"}}, DENSE),
    ("num_hidden_layers=None", {}, {k: v for k, v in DENSE.items() if k != "num_hidden_layers"}),
]


@pytest.mark.parametrize(("names", "sections", "hf"), BROKEN)
def test_a_broken_rule_gives_one_message(
    names: str, sections: Sections, hf: Mapping[str, object]
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_config(make_config(**sections), hf)
    assert len(raised.value.problems) == 1, raised.value.problems
    assert names in str(raised.value)


ON_GPU: list[tuple[str, Sections]] = [
    ("model.dtype=float32", {"precision": FP8, "model": {"dtype": "float32"}}),
    ("precision.fp8_format=hybrid", {"precision": FP8 | {"fp8_format": "hybrid"}}),
    ("first_last_layers_bf16", {"precision": {"fp8": "delayed", "first_last_layers_bf16": True}}),
    (
        "parallel.distributed_optimizer=true",
        {
            "precision": FP8 | {"fp8_param_gather": True},
            "parallel": {"distributed_optimizer": False},
        },
    ),
    ("must be a multiple of 128", {"precision": FP8, "training": {"tokens_per_micro_batch": 500}}),
    ("rollout.engines=3", {"rollout": {"engines": 3}}),
    (
        "rollout.placement=disaggregated",
        {"rollout": {"placement": "disaggregated"}, "parallel": {"data": 4, "nodes": 2}},
    ),
    (
        "share the 2 trainers' devices",
        {"rollout": {"engines": 2, "engine_tensor": 2}, "parallel": {"data": 4, "nodes": 2}},
    ),
]


@pytest.mark.parametrize(("names", "sections"), ON_GPU)
def test_rules_of_gpu_runs_are_checked_without_a_gpu(names: str, sections: Sections) -> None:
    config = make_config(**sections).model_copy(update={"device": "cuda"})
    with pytest.raises(ConfigError) as raised:
        check_config(config, DENSE)
    assert len(raised.value.problems) == 1, raised.value.problems
    assert names in str(raised.value)


def test_fp8_dimensions_must_fill_blocks() -> None:
    config = make_config(precision=FP8, parallel={"tensor": 2}).model_copy(
        update={"device": "cuda"}
    )
    with pytest.raises(ConfigError, match="intermediate_size / tensor = 84"):
        check_config(config, DENSE | {"intermediate_size": 168})


@pytest.mark.parametrize(
    ("sections", "hf"),
    [
        ({}, DENSE),
        ({"loss": GSPO}, MOE),
        ({"loss": CISPO}, DENSE),
        ({"loss": {"mismatch": "geometric", "mismatch_low": 0.999, "mismatch_high": 1.001}}, DENSE),
        ({"sampling": {"prompts_per_round": 1}}, DENSE),
        (
            {
                "advantage": {"estimator": "gae", "lam": 0.95},
                "critic": {"lr": 1e-4},
                "rollout": {"group_size": 1, "prompts_per_step": 64},
                "sampling": {"dynamic": False},
            },
            DENSE,
        ),
        ({"advantage": {"estimator": "gae"}}, DENSE),
        ({"rollout": {"logprobs": "raw"}}, DENSE),
        ({"rollout": {"temperature": 0.7}}, DENSE),
        ({"rollout": {"endpoints": ["http://[::1]:80", "unix:/a"], "engines": 2}}, DENSE),
        ({"rollout": {"max_engine_tokens": 96}}, DENSE),
        ({"reward": {"overlong_buffer_tokens": 64}}, DENSE),
        ({"parallel": {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}}, DENSE),
        ({"parallel": {"tensor": 2, "data": 2, "expert": 4}}, MOE),
        ({"parallel": {"tensor": 2, "expert_tensor": 2}}, MOE),
        ({}, SMOLLM2),
        (
            {
                "parallel": {"tensor": 3, "pipeline": 2},
                "training": {"tokens_per_micro_batch": 1026},
            },
            SMOLLM2,
        ),
    ],
)
def test_sound_configurations_pass(sections: Sections, hf: Mapping[str, object]) -> None:
    check_config(make_config(**sections), hf)


def test_all_broken_rules_are_told_at_once() -> None:
    config = make_config(rollout={"temperature": 0.0, "top_k": 5}, parallel={"pipeline": 3})
    with pytest.raises(ConfigError) as raised:
        check_config(config, DENSE)
    assert len(raised.value.problems) == 3


def test_a_secret_in_an_endpoint_is_not_repeated() -> None:
    config = make_config(rollout={"endpoints": ["http://me:hunter2canary@127.0.0.1:80"]})
    with pytest.raises(ConfigError) as raised:
        check_config(config, DENSE)
    assert "hunter2canary" not in str(raised.value)


@pytest.mark.parametrize("fp8", ["none", "tensorwise", "delayed", "mxfp8", "blockwise"])
@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_packs_are_checked_against_the_multiple_they_are_padded_to(
    fp8: str, tensor: int, context: int, sequence_parallel: bool
) -> None:
    config = make_config(
        parallel={"tensor": tensor, "context": context, "sequence_parallel": sequence_parallel},
        precision={"fp8": fp8},
    )
    expected = pad_multiple(tensor, context, sequence_parallel, config.precision.fp8)
    assert pack_multiple(config) == expected


def test_the_papers_settings_are_the_defaults() -> None:
    config = make_config()
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (1e-6, 20)
    assert (config.loss.aggregation, config.loss.kl_coef) == ("token_mean", 0.0)


def test_a_single_update_a_step_is_remarked_on() -> None:
    assert not list(remarks(make_config(data={"heldout": "h.jsonl"})))
    one = make_config(training={"responses_per_update": 64}, data={"heldout": "h.jsonl"})
    assert ["One update a step" in remark for remark in remarks(one)] == [True]
