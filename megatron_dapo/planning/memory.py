"""Bytes of one trainer rank and of one engine rank, from the configuration alone.

Parameters, gradients and optimizer are exact up to buffer padding. Activations are a model
of what the backward pass keeps; `FORMULAS` states it, and `MemoryPlan` shows its parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dapo.config.model_shape import ModelShape
from megatron_dapo.config.schema import ParallelConfig, RunConfig

GIB = 2**30
HEAD_ROWS = 1024
"""Tokens whose logits exist at a time on a GPU."""
FP8_COPIES = 2
"""One byte a parameter for each of the two directions that matrix products read it in."""
FORMULAS = (
    "weights      bytes of dtype x parameters of the rank (embedding on the first stage, head on "
    "the last); FP8 adds 2 (row- and column-wise copies), or has only those with fp8_param_gather",
    "gradients    4 bytes x parameters (fp32 accumulation)",
    "optimizer    bf16: 12 bytes x parameters (master, two moments), fp32: 8; divided by the ranks "
    "that share the parameters when parallel.distributed_optimizer is on",
    "activations  stage's layers x micro-batches in flight (pipeline - stage) x tokens / context x "
    "bytes x [4 hidden + (2 heads + 2 kv) head_dim + 3 ffn] / tensor; MoE: 3 ffn becomes top-k x "
    "(3 expert_ffn + 2 hidden); recompute=full keeps hidden of each layer and one layer whole",
    "critic       advantage.estimator=gae: weights, gradients and optimizer once more (the head it "
    "does not have included)",
    "head         last stage: padded vocabulary / tensor x [4 hidden (fp32 gradient while it is "
    "formed) + block x (bytes of dtype + 8)], block = at most 1,024 tokens; logits of a whole "
    "micro-batch never exist",
    "engine       weights / engine_tensor, and 2 x layers x kv heads x head_dim x bytes per cached "
    "token; a colocated engine gives its memory back while training",
)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank of pipeline stage `stage`."""

    stage: int
    parameter_count: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    """Scratch of the loss; the head's weight is among the parameters."""
    reference: float
    critic: float
    """Weights, gradients and optimizer of PPO's second model."""

    @property
    def total(self) -> float:
        """Sum of the parts; CUDA context, NCCL buffers and fragmentation come on top."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.head
            + self.reference
            + self.critic
        )


@dataclass(frozen=True)
class EnginePlan:
    """Bytes on one rank of an engine."""

    weights: float
    cache_per_token: float
    cache_when_full: float
    """All of rollout.max_concurrent_sequences at their longest."""


def padded_vocab(vocab: int, tensor: int) -> int:
    """Rows of embedding and head in training: Megatron pads to a multiple of 128 x tensor."""
    multiple = 128 * tensor
    return -(-vocab // multiple) * multiple


def parameter_count(shape: ModelShape) -> int:
    """Parameters of the whole model without padding; biases of a few thousand left out."""
    per_layer = _dense_part(shape) + _ffn_part(shape) + _norms(shape)
    return shape.layers * per_layer + _tables(shape) + shape.hidden


def _tables(shape: ModelShape) -> int:
    """Parameters of embedding and head."""
    return shape.vocab * shape.hidden * (1 if shape.tied_embeddings else 2)


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Size of one checkpoint: weights, masters and both moments, of the policy and a critic."""
    states = 8 if config.model.dtype == "float32" else 12
    models = 2 if config.advantage.estimator == "gae" else 1
    return models * parameter_count(shape) * (_item_bytes(config) + states)


def plan_stage(config: RunConfig, shape: ModelShape, stage: int) -> MemoryPlan:
    """What one rank of pipeline stage `stage` holds at its peak."""
    parallel = config.parallel
    dense, experts = _rank_parameters(shape, parallel, stage)
    states = 8 if config.model.dtype == "float32" else 12
    dense_sharers = parallel.data * parallel.context if parallel.distributed_optimizer else 1
    expert_sharers = _expert_sharers(parallel) if parallel.distributed_optimizer else 1
    parameters = (dense + experts) * _weight_bytes(config)
    gradients = 4 * (dense + experts)
    optimizer = states * (dense / dense_sharers + experts / expert_sharers)
    gae = config.advantage.estimator == "gae"
    return MemoryPlan(
        stage=stage,
        parameter_count=dense + experts,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(config, shape, stage),
        head=_head_scratch(config, shape) if stage == parallel.pipeline - 1 else 0.0,
        reference=parameters if config.loss.kl_coef > 0 else 0.0,
        critic=parameters + gradients + optimizer if gae else 0.0,
    )


def plan_engine(config: RunConfig, shape: ModelShape) -> EnginePlan:
    """What one rank of an engine holds."""
    rollout = config.rollout
    item = 4 if config.engine_dtype == "float32" else 2
    kv_heads = max(1, shape.kv_heads // rollout.engine_tensor)
    per_token = 2 * shape.layers * kv_heads * shape.head_dim * item
    longest = rollout.max_engine_tokens or config.max_sequence_tokens
    tables, in_layers = _tables(shape), parameter_count(shape) - _tables(shape)
    matrix_item = item if rollout.engine_quantization is None else 1  # FP8; a scale for 16,384
    return EnginePlan(
        weights=(tables * item + in_layers * matrix_item) / rollout.engine_tensor,
        cache_per_token=per_token,
        cache_when_full=per_token * longest * rollout.max_concurrent_sequences,
    )


def _item_bytes(config: RunConfig) -> int:
    return 4 if config.model.dtype == "float32" else 2


def _weight_bytes(config: RunConfig) -> int:
    if config.precision.fp8 == "none":
        return _item_bytes(config)
    return FP8_COPIES if config.precision.fp8_param_gather else _item_bytes(config) + FP8_COPIES


def _attention_width(shape: ModelShape) -> int:
    return (shape.heads + shape.kv_heads) * 2 * shape.head_dim


def _dense_part(shape: ModelShape) -> int:
    return shape.hidden * _attention_width(shape)


def _ffn_part(shape: ModelShape) -> int:
    if shape.is_moe:
        return shape.experts * (3 * shape.hidden * shape.expert_ffn + shape.hidden)
    return 3 * shape.hidden * shape.ffn


def _norms(shape: ModelShape) -> int:
    return 2 * shape.hidden


def _rank_parameters(shape: ModelShape, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    """Parameters of one rank of a stage: (outside experts, in experts)."""
    layers = shape.layers // parallel.pipeline
    table = padded_vocab(shape.vocab, parallel.tensor) * shape.hidden // parallel.tensor
    dense = layers * (_dense_part(shape) // parallel.tensor + _norms(shape))
    experts = 0
    if shape.is_moe:
        dense += layers * shape.hidden * shape.experts  # router, on every rank
        local = shape.experts // parallel.expert
        width = shape.expert_ffn // parallel.expert_tensor_size
        experts = layers * local * 3 * shape.hidden * width
    else:
        dense += layers * _ffn_part(shape) // parallel.tensor
    if stage == 0:
        dense += table
    if stage == parallel.pipeline - 1:
        dense += shape.hidden
        if not (shape.tied_embeddings and parallel.pipeline == 1):
            dense += table
    return dense, experts


def _expert_sharers(parallel: ParallelConfig) -> int:
    ranks = parallel.tensor * parallel.context * parallel.data
    return ranks // (parallel.expert * parallel.expert_tensor_size)


def _local_tokens(config: RunConfig) -> int:
    return math.ceil(config.training.tokens_per_micro_batch / config.parallel.context)


def _activations(config: RunConfig, shape: ModelShape, stage: int) -> float:
    parallel = config.parallel
    item = _item_bytes(config)
    hidden = shape.hidden / (parallel.tensor if parallel.uses_sequence_parallel else 1)
    sharded = _attention_width(shape) / parallel.tensor
    if shape.is_moe:
        ffn = 3 * shape.expert_ffn / parallel.expert_tensor_size + 2 * shape.hidden
        sharded += shape.experts_per_token * ffn / parallel.tensor
    else:
        sharded += 3 * shape.ffn / parallel.tensor
    whole_layer = 4 * hidden + sharded
    layers = shape.layers / parallel.pipeline
    in_flight: float = parallel.pipeline - stage
    if parallel.virtual_pipeline:
        in_flight *= 1 + (parallel.pipeline - 1) / (parallel.pipeline * parallel.virtual_pipeline)
    kept = layers * in_flight * whole_layer
    if config.training.recompute == "full":
        kept = layers * in_flight * hidden + whole_layer
    return kept * _local_tokens(config) * item


def _head_scratch(config: RunConfig, shape: ModelShape) -> float:
    tensor = config.parallel.tensor
    rows = padded_vocab(shape.vocab, tensor) / tensor
    block = min(_local_tokens(config), HEAD_ROWS)
    return rows * (4 * shape.hidden + block * (_item_bytes(config) + 8))
