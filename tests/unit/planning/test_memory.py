"""Memory of a layout: counts against real modules, parts against hand-made sums."""

from __future__ import annotations

import pytest
import torch
import transformers

from megatron_dapo.cli.plan import plan_of_run
from megatron_dapo.config import load_config
from megatron_dapo.config.machine_checks import decide_device
from megatron_dapo.config.model_shape import ModelShape, read_hf_config
from megatron_dapo.loss.head_blocks import GPU_ROWS
from megatron_dapo.planning.memory import (
    HEAD_ROWS,
    padded_vocab,
    parameter_count,
    plan_engine,
    plan_stage,
)
from tests.tiny_models import tiny_model
from tests.unit.config.runs import DENSE, MOE, make_config

SHAPE, MOE_SHAPE = ModelShape.from_hf(DENSE), ModelShape.from_hf(MOE)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied", "qwen3", "qwen3_moe"])
def test_parameters_are_counted_as_the_real_model_has_them(family: str) -> None:
    model = tiny_model(family)
    shape = ModelShape.from_hf(model.config.to_dict())
    named = model.named_parameters()
    left_out = sum(
        p.numel() for n, p in named if n.endswith(("bias", "q_norm.weight", "k_norm.weight"))
    )
    real = sum(p.numel() for p in model.parameters())
    assert parameter_count(shape) == real - left_out


def test_qwen32b_has_its_published_size() -> None:
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained("examples/qwen32b/model")
        model = transformers.AutoModelForCausalLM.from_config(config)
    real = sum(p.numel() for p in model.parameters())
    assert parameter_count(ModelShape.from_hf(config.to_dict())) == pytest.approx(real, rel=1e-4)


@pytest.mark.parametrize("shape", [SHAPE, MOE_SHAPE])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_together_hold_every_parameter(shape: ModelShape, pipeline: int, tensor: int) -> None:
    config = make_config(parallel={"pipeline": pipeline, "tensor": tensor})
    held = sum(
        tensor * plan_stage(config, shape, stage).parameter_count for stage in range(pipeline)
    )
    norms = shape.layers * 2 * shape.hidden + shape.hidden
    routers = shape.layers * shape.hidden * shape.experts
    padding = 2 * shape.hidden * (padded_vocab(shape.vocab, tensor) - shape.vocab)
    assert held == parameter_count(shape) + (tensor - 1) * (norms + routers) + padding


def test_experts_are_shared_out_to_expert_ranks() -> None:
    alone = make_config(parallel={"data": 4})
    spread = make_config(parallel={"data": 4, "expert": 4})
    experts = MOE_SHAPE.layers * 8 * 3 * 128 * 64
    difference = plan_stage(alone, MOE_SHAPE, 0).parameter_count
    difference -= plan_stage(spread, MOE_SHAPE, 0).parameter_count
    assert difference == experts * 3 // 4


def test_bytes_of_weights_gradients_and_optimizer() -> None:
    bf16 = plan_stage(make_config(parallel={"data": 2}), SHAPE, 0)
    n = bf16.parameter_count
    assert (bf16.parameters, bf16.gradients, bf16.optimizer) == (2 * n, 4 * n, 12 * n / 2)
    whole = make_config(
        parallel={"data": 2, "distributed_optimizer": False},
        model={"path": "m", "dtype": "float32"},
    )
    fp32 = plan_stage(whole, SHAPE, 0)
    assert (fp32.parameters, fp32.gradients, fp32.optimizer) == (4 * n, 4 * n, 8 * n)


def test_a_reference_policy_costs_its_weights() -> None:
    plan = plan_stage(make_config(loss={"kl_coef": 0.01}), SHAPE, 0)
    assert plan.reference == plan.parameters > 0
    assert plan.total == plan.parameters * 2 + plan.gradients + plan.optimizer + (
        plan.activations + plan.head
    )


def test_a_critic_costs_a_second_model() -> None:
    plan = plan_stage(make_config(advantage={"estimator": "gae"}), SHAPE, 0)
    assert plan.critic == plan.parameters + plan.gradients + plan.optimizer > 0
    assert plan.total == 2 * plan.critic + plan.activations + plan.head


def test_fp8_weights_keep_two_copies() -> None:
    n = plan_stage(make_config(), SHAPE, 0).parameter_count
    fp8 = make_config(precision={"fp8": "blockwise"})
    gathered = make_config(precision={"fp8": "blockwise", "fp8_param_gather": True})
    assert plan_stage(fp8, SHAPE, 0).parameters == 4 * n
    assert plan_stage(gathered, SHAPE, 0).parameters == 2 * n


def test_activations_shrink_with_every_cut_and_with_recomputation() -> None:
    def activations(**sections: dict[str, object]) -> float:
        return plan_stage(make_config(**sections), SHAPE, 0).activations

    whole = activations()
    per_token = 4 * 128 + (2 * 4 + 2 * 2) * 32 + 3 * 256
    assert whole == 1024 * 4 * per_token * 2
    assert activations(parallel={"context": 2}) == whole / 2
    assert activations(parallel={"tensor": 2}) == whole / 2
    assert activations(training={"recompute": "full"}) < whole
    assert plan_stage(make_config(parallel={"pipeline": 2}), SHAPE, 1).activations == whole / 2


def test_only_the_last_stage_has_the_head_and_never_the_logits_of_all_tokens() -> None:
    config = make_config(parallel={"pipeline": 2, "tensor": 2})
    assert plan_stage(config, SHAPE, 0).head == 0
    assert plan_stage(config, SHAPE, 1).head == 512 / 2 * (4 * 128 + 1024 * (2 + 8))
    longer = make_config(
        parallel={"pipeline": 2, "tensor": 2}, training={"tokens_per_micro_batch": 4096}
    )
    assert plan_stage(longer, SHAPE, 1).head == plan_stage(config, SHAPE, 1).head
    assert HEAD_ROWS == GPU_ROWS


def test_an_engine_caches_keys_and_values_of_its_heads() -> None:
    one = plan_engine(make_config(), SHAPE)
    two = plan_engine(make_config(rollout={"engine_tensor": 2}), SHAPE)
    assert one.cache_per_token == 2 * 4 * 2 * 32 * 2
    assert two.cache_per_token == one.cache_per_token / 2
    assert one.cache_when_full == one.cache_per_token * 96 * 256
    assert two.weights == parameter_count(SHAPE) * 2 / 2


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_an_engine_holds_what_an_update_brings(quantization: str | None) -> None:
    """Of the 32B shape, for which copies of key heads, biases and scales are a thousandth."""
    file = "examples/qwen32b/dapo.yaml"
    chosen = [f"rollout.engine_quantization={quantization}"] if quantization else []
    config = decide_device(load_config(file, ["rollout.engine_tensor=4", *chosen]))
    shape = ModelShape.from_hf(read_hf_config(config.model.path))
    owned = plan_of_run(config, shape).lower_bound / config.rollout.engines / 4
    assert plan_engine(config, shape).weights == pytest.approx(owned, rel=2e-3)


@pytest.mark.parametrize(("tensor", "rows"), [(1, 152064), (4, 152064), (8, 152576)])
def test_the_vocabulary_is_padded_to_128_rows_a_tensor_rank(tensor: int, rows: int) -> None:
    assert padded_vocab(152064, tensor) == rows
