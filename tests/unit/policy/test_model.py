"""From config.json to Megatron's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from megatron_dapo.config.schema import ParallelConfig, RunConfig
from megatron_dapo.policy.model import (
    batches_p2p,
    build_chunks,
    check_family,
    padded_vocab_size,
    transformer_config,
)

CASES = json.loads((Path(__file__).parents[1] / "handed_cases.json").read_text())["cases"]


def run_config(**sections: object) -> RunConfig:
    return RunConfig.model_validate(
        {"run_dir": "unused", "model": {"path": "unused"}, "data": {"train": "unused"}} | sections
    )


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["op"] == "padded_vocab"], ids=lambda c: c["id"]
)
def test_handed_case(case: dict) -> None:
    given = case["input"]
    padded = padded_vocab_size(given["vocab"], given["tp"], divisible_by=given["divisible_by"])
    assert padded == case["expect"]["padded"]


@pytest.mark.parametrize(("vocab", "tensor", "padded"), [(151936, 2, 152064), (512, 4, 512)])
def test_the_vocabulary_is_whole_blocks_on_every_tensor_rank(
    vocab: int, tensor: int, padded: int
) -> None:
    assert padded_vocab_size(vocab, tensor) == padded


def test_qwen2_has_query_key_value_biases_and_qwen3_has_norms() -> None:
    qwen2 = transformer_config(run_config(), transformers.Qwen2Config(), "local")
    qwen3 = transformer_config(run_config(), transformers.Qwen3Config(), "local")
    assert (qwen2.add_qkv_bias, qwen2.qk_layernorm) == (True, False)
    assert (qwen3.add_qkv_bias, qwen3.qk_layernorm) == (False, True)
    assert qwen2.kv_channels == 128 and not qwen2.add_bias_linear


def test_moe_layers_follow_the_checkpoints_pattern() -> None:
    hf = transformers.Qwen3MoeConfig(
        num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False
    )
    moe = transformer_config(run_config(moe={"aux_loss_coef": 0.01}), hf, "local")
    assert moe.moe_layer_freq == [0, 1, 0, 0]
    assert moe.moe_router_pre_softmax and moe.moe_token_dispatcher_type == "alltoall"
    assert (moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff) == ("aux_loss", 0.01)


def test_gradients_are_divided_once_and_stages_exchange_no_shapes() -> None:
    config = transformer_config(run_config(), transformers.Qwen2Config(), "local")
    assert config.calculate_per_token_loss and not config.variable_seq_lengths
    assert config.params_dtype is torch.bfloat16


def test_gloo_never_batches_messages_under_virtual_pipelining() -> None:
    virtual = ParallelConfig(pipeline=2, virtual_pipeline=2)
    assert not batches_p2p("gloo", virtual)
    assert batches_p2p("nccl", virtual) and batches_p2p("gloo", ParallelConfig(pipeline=2))


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (transformers.GPT2Config(), "model_type='gpt2'"),
        (transformers.Qwen2Config(use_sliding_window=True), "use_sliding_window"),
        (transformers.Qwen2Config(hidden_act="gelu"), "hidden_act"),
        (transformers.LlamaConfig(mlp_bias=True), "mlp_bias"),
        (transformers.Qwen3Config(attention_bias=True), "attention_bias"),
        (
            transformers.Qwen3Config(
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
            ),
            "rope_parameters",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_computed_differently_is_refused(
    hf_config: transformers.PretrainedConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_family(hf_config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="FP8 may really run there")
def test_fp8_is_never_silently_full_precision() -> None:
    config = run_config(precision={"fp8": "blockwise"})
    with pytest.raises(ValueError, match="needs Transformer Engine"):
        build_chunks(config, transformers.Qwen2Config(), None)  # type: ignore[arg-type]
