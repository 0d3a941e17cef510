"""Random layouts with FP8 engines, matrices whose blocks differ much, and what vLLM would hold."""

from __future__ import annotations

import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor

from megatron_dapo.resharding.block_grid import BLOCK, SCALE_SUFFIX
from megatron_dapo.resharding.engine_map import EngineMap
from megatron_dapo.resharding.name_map import Family
from megatron_dapo.resharding.plan import EngineLayout, ReshardPlan, TrainLayout, build_plan
from megatron_dapo.resharding.quantize import quantize_blocks
from tests.unit.resharding.layouts import Case, vllm_parameters

ENGINES = (1, 2, 3, 4, 8)


def _fills(ranks: int, kv_heads: int, heads: int, head: int) -> bool:
    """Whether the heads of an engine rank fill blocks."""
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return False
    return not (heads // ranks * head % BLOCK or max(kv_heads // ranks, 1) * head % BLOCK)


@st.composite
def fp8_cases(draw: st.DrawFn) -> Case:
    """Engine ranks hold whole blocks; trainer shards are cut at blocks or anywhere else."""
    name = draw(st.sampled_from(["qwen2", "qwen3", "qwen3_moe"]))
    wide = name == "qwen2"  # its hidden size is that of its heads
    kv_heads, head = draw(
        st.sampled_from([(4, 32), (8, 32), (12, 32)] if wide else [(2, 128), (4, 64), (12, 64)])
    )
    heads = kv_heads * (1 if wide else draw(st.sampled_from([1, 2, 4])))
    tensor = draw(st.sampled_from([n for n in (1, 2, 3, 4) if kv_heads % n == 0]))
    engine_tensor = draw(st.sampled_from([n for n in ENGINES if _fills(n, kv_heads, heads, head)]))
    pipeline, data = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    sizes: dict[str, object] = {
        "num_hidden_layers": pipeline,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "hidden_size": heads * head if wide else 2 * BLOCK,
        "intermediate_size": 3 * BLOCK * engine_tensor,
        "vocab_size": 150,
        "tie_word_embeddings": draw(st.booleans()),
    }
    expert, expert_tensor, expert_parallel = 1, tensor, False
    if name == "qwen3_moe":
        sizes |= {"num_experts": 2, "decoder_sparse_step": 1}
        sizes["moe_intermediate_size"] = 3 * BLOCK * engine_tensor
        expert = draw(st.sampled_from([n for n in (1, 2) if tensor * data % n == 0]))
        inside = tensor * data // expert
        expert_tensor = draw(st.sampled_from([n for n in (1, 2, 3) if inside % n == 0]))
        expert_parallel = draw(st.booleans()) and engine_tensor <= 2
    return Case(
        transformers.AutoConfig.for_model(name, **sizes),
        TrainLayout(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            expert=expert,
            expert_tensor=expert_tensor,
            padded_vocab_size=156,
        ),
        EngineLayout(
            tensor=engine_tensor,
            replicas=draw(st.sampled_from([1, 2])),
            expert_parallel=expert_parallel,
            quantization="fp8",
        ),
        draw(st.sampled_from([3000, 50_000, 10**7])),
    )


def plan_of(case: Case) -> ReshardPlan:
    return build_plan(case.train, case.engine, case.family, bucket_bytes=case.bucket_bytes)


def telling(family: Family, seed: int = 0) -> dict[str, Tensor]:
    """Hugging Face tensors, fp32: blocks of very different size, one of zeros in each matrix."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in family.hf_tensors.items():
        values = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            rows, cols = (torch.arange(size) // BLOCK for size in shape)
            values *= 2.0 ** ((rows[:, None] * 5 + cols[None] * 3) % 11 - 5.0)
            values[:BLOCK, -BLOCK:] = 0
        found[name] = values
    return found


def expected(case: Case, tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What an engine rank holds after each matrix was quantised whole, in one place."""
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    values, scales = dict(rounded), {}
    for name in EngineMap(case.family, case.engine).quantized_tensors():
        whole, scales[name] = quantize_blocks(rounded[name])
        values[name] = bits(whole)
    found = vllm_parameters(case, values, rank)
    cut = vllm_parameters(case, scales, rank)
    return found | {name + SCALE_SUFFIX: value for name, value in cut.items()}


def bits(tensor: Tensor) -> Tensor:
    """The same numbers as bytes."""
    return tensor.contiguous().view(torch.uint8)
