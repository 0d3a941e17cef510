"""From a Hugging Face configuration to Megatron GPT model chunks; weights are loaded elsewhere."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from megatron_dapo import device
from megatron_dapo.config.model_family import family_problems
from megatron_dapo.config.schema import MoeConfig, ParallelConfig, RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.fp8 import check_fp8, check_recipe_is_live, fp8_fields

device.install_cpu_support()

from megatron.core.fp8_utils import get_fp8_recipe  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_dapo.policy.local_layers import PackedAttention, RMSNorm  # noqa: E402

LayerProvider = Literal["local", "te"]


def padded_vocab_size(vocab_size: int, tensor_size: int, *, divisible_by: int = 128) -> int:
    """Rows of embedding and output layer in training: whole blocks on every tensor rank.

    Rows past `vocab_size` are no tokens: the loss masks them and exports leave them out.
    """
    block = divisible_by * tensor_size
    return -(-vocab_size // block) * block


def layer_provider() -> LayerProvider:
    """`te`: Transformer Engine's fused layers, where it can run; `local`: plain torch."""
    return "te" if device.has_transformer_engine() else "local"


def build_chunks(
    config: RunConfig,
    hf_config: PretrainedConfig,
    parallel: ParallelContext,
    model_class: type[GPTModel] = GPTModel,
) -> list[GPTModel]:
    """This rank's model chunks with fresh weights: one, or `virtual_pipeline` of them.

    Every rank calls it. Communicates: tied embeddings, over first and last stage.

    Args:
        model_class: GPTModel, or `value_head.ValueModel`.

    Raises:
        ValueError: the model family, one of its options, or the FP8 recipe cannot be trained.
    """
    check_family(hf_config)
    check_fp8(config.precision, dtype=config.model.dtype)
    provider = layer_provider()
    if config.training.deterministic:
        # Transformer Engine reads it when an attention layer is built.
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    transformer = transformer_config(config, hf_config, provider)
    if config.precision.fp8 != "none":
        check_recipe_is_live(config.precision, get_fp8_recipe(transformer))
    count = config.parallel.virtual_pipeline
    return [
        _build_chunk(
            model_class, transformer, hf_config, parallel, provider, index if count else None, count
        )
        for index in range(count or 1)
    ]


def _build_chunk(
    model_class: type[GPTModel],
    transformer: TransformerConfig,
    hf_config: PretrainedConfig,
    parallel: ParallelContext,
    provider: LayerProvider,
    index: int | None,
    count: int | None,
) -> GPTModel:
    first = parallel.is_first_stage and index in (None, 0)
    last = parallel.is_last_stage and (index is None or index + 1 == count)
    model = model_class(
        transformer,
        _block_spec(transformer, provider, index),
        vocab_size=padded_vocab_size(hf_config.vocab_size, parallel.tp_size),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=hf_config.rope_parameters["rope_theta"],
        rope_scaling=hf_config.rope_parameters["rope_type"] == "llama3",
        rope_scaling_factor=hf_config.rope_parameters.get("factor", 1.0),
        vp_stage=index,
    )
    return model.to(device.current())


def _block_spec(
    transformer: TransformerConfig, provider: LayerProvider, index: int | None
) -> TransformerBlockSubmodules:
    """Layer specs of one chunk; the local provider gets our norm and core attention."""
    spec = get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=provider == "te",
        normalization="RMSNorm",
        vp_stage=index,
    )
    if provider == "te":
        return spec
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        attention.core_attention = PackedAttention
        if transformer.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=spec.layer_specs, layer_norm=RMSNorm)


def check_family(hf_config: PretrainedConfig) -> None:
    """Refuse what the trained model would compute differently from the checkpoint's model.

    Raises:
        ValueError: names the key of config.json, its value, and what can be trained.
    """
    problems = list(family_problems(hf_config.to_dict()))
    if problems:
        raise ValueError("\n".join(problems))


def transformer_config(
    config: RunConfig, hf_config: PretrainedConfig, provider: LayerProvider
) -> TransformerConfig:
    """Megatron's description of the model and its layout, from the run and config.json."""
    dtype = getattr(torch, config.model.dtype)
    heads = hf_config.num_attention_heads
    head_dim = hf_config.to_dict().get("head_dim") or hf_config.hidden_size // heads
    fields: dict[str, object] = dict(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim,
        ffn_hidden_size=hf_config.intermediate_size,
        layernorm_epsilon=hf_config.rms_norm_eps,
        init_method_std=hf_config.initializer_range,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf_config.model_type == "qwen2",
        qk_layernorm=hf_config.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        deterministic_mode=config.training.deterministic,
    )
    fields |= _layout_fields(config.parallel)
    fields |= _kernel_fields(provider)
    fields |= _recompute_fields(config.training.recompute)
    fields |= fp8_fields(config.precision)
    if hf_config.model_type == "qwen3_moe":
        fields |= _moe_fields(config.moe, hf_config, provider)
    return TransformerConfig(**fields)


def _layout_fields(parallel: ParallelConfig) -> dict[str, object]:
    return dict(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
        sequence_parallel=parallel.uses_sequence_parallel,
        # Gradients are divided once, by the sum of the denominators over data and context ranks.
        calculate_per_token_loss=True,
        # All micro-batches of an update have one length, so stages need not exchange shapes.
        variable_seq_lengths=False,
        batch_p2p_comm=batches_p2p(device.backend(), parallel),
    )


def batches_p2p(backend: str, parallel: ParallelConfig) -> bool:
    """Whether stages send and receive in one batch of operations.

    Not with gloo under virtual pipelining: with two stages the next and the previous stage are
    the same rank, gloo's batched messages carry no tags, and forward and backward activations
    get swapped without an error.
    """
    return not (backend == "gloo" and parallel.virtual_pipeline is not None)


def _kernel_fields(provider: LayerProvider) -> dict[str, object]:
    """Fusions; each needs CUDA, Transformer Engine or apex, so the CPU runs plain torch."""
    on_gpu = device.backend() == "nccl"
    return dict(
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=provider == "te",
    )


def _recompute_fields(recompute: str) -> dict[str, object]:
    if recompute == "full":
        return dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    if recompute == "selective":
        return dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    return {}


def _moe_fields(
    moe: MoeConfig, hf_config: PretrainedConfig, provider: LayerProvider
) -> dict[str, object]:
    dense = set(hf_config.mlp_only_layers)
    sparse_step = hf_config.decoder_sparse_step
    grouped = provider == "te" if moe.grouped_gemm is None else moe.grouped_gemm
    if grouped and provider != "te":
        raise ValueError(
            "moe.grouped_gemm=true: needs Transformer Engine on a CUDA device. "
            "Leave it unset to use it where it can run."
        )
    return dict(
        num_moe_experts=hf_config.num_experts,
        moe_router_topk=hf_config.num_experts_per_tok,
        moe_ffn_hidden_size=hf_config.moe_intermediate_size,
        moe_layer_freq=[
            int(layer not in dense and (layer + 1) % sparse_step == 0)
            for layer in range(hf_config.num_hidden_layers)
        ],
        # Softmax over the chosen experts equals the softmax over all, renormalised.
        moe_router_pre_softmax=not hf_config.norm_topk_prob,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss" if moe.aux_loss_coef > 0 else "none",
        moe_aux_loss_coeff=moe.aux_loss_coef,
        moe_z_loss_coeff=moe.z_loss_coef or None,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=grouped,
    )
