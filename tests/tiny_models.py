"""Small Hugging Face models with random but telling weights, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe")


def tiny_model(
    family: str, *, layers: int = 4, seed: int = 0, **overrides: object
) -> PreTrainedModel:
    """A fp32 model of `family`; biases and norms are moved off their trivial start values.

    `smollm2` is a Llama of that model's proportions: tied, 9 heads on 3 key/value heads of 64.
    """
    shape = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family in ("qwen2_tied", "smollm2"),
        "initializer_range": 0.08,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
    } | overrides
    torch.manual_seed(seed)
    if family == "smollm2":
        heads = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
        rope = {"rope_type": "default", "rope_theta": 100000.0}
        config = transformers.LlamaConfig(**shape | heads | {"rope_parameters": rope} | overrides)
        model = transformers.LlamaForCausalLM(config)
    elif family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    elif family in ("qwen2", "qwen2_tied"):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    elif family == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{"head_dim": 32} | shape))
    elif family == "qwen3_moe":
        moe = {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**moe | shape))
    else:
        raise ValueError(f"family {family!r} is not one of {FAMILIES}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float().eval()


def save_tiny_model(folder: Path, family: str, **options: object) -> PreTrainedModel:
    """Write `tiny_model(family)` as a Hugging Face folder (no tokenizer) and return it."""
    model = tiny_model(family, **options)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    return model
