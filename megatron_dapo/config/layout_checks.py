"""Rules between the parallel layout, the precision and the model's shape."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_dapo.config.model_shape import ModelShape
from megatron_dapo.config.schema import RunConfig

FP8_DIMENSION = 16
"""Dimensions of an FP8 matrix product come in multiples of this."""


def layout_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Everything about `parallel`, `precision` and the devices that carry them."""
    tensor = list(_tensor_problems(config, shape))
    yield from tensor
    yield from _pipeline_problems(config, shape)
    yield from _expert_problems(config, shape)
    yield from _device_problems(config)
    yield from _precision_problems(config)
    if not tensor:  # else one mistake would be told several times
        yield from _pack_problems(config)
        yield from _fp8_dimension_problems(config, shape)


def _tensor_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    tensor = config.parallel.tensor
    cut = {
        "attention heads": shape.heads,
        "key-value heads (one lives whole on one rank)": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "hidden_size": shape.hidden,
    }
    uneven = [f"{size} {name}" for name, size in cut.items() if size % tensor]
    if uneven:
        yield (
            f"parallel.tensor={tensor}: must divide the model's {', '.join(uneven)}. "
            f"Use {_divisors(math.gcd(*cut.values()))}."
        )
    if tensor == 1 and config.parallel.sequence_parallel:
        yield (
            "parallel.sequence_parallel=true: splits activations between tensor ranks, so it needs "
            "parallel.tensor >= 2. Leave it out."
        )
    if shape.is_moe and tensor > 1 and not config.parallel.uses_sequence_parallel:
        yield (
            f"parallel.sequence_parallel=false: an MoE model with parallel.tensor={tensor} needs "
            "it on. Leave it out."
        )


def _pipeline_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    pipeline, virtual = config.parallel.pipeline, config.parallel.virtual_pipeline
    if virtual is not None and pipeline < 2:
        yield (
            f"parallel.virtual_pipeline={virtual}: interleaves the stages of a pipeline, so it "
            f"needs parallel.pipeline >= 2, which is {pipeline}. Leave it out."
        )
        return
    if virtual == 1:
        yield "parallel.virtual_pipeline=1: must be at least 2. Leave it out for one chunk a stage."
    chunks = pipeline * (virtual or 1)
    if shape.layers % chunks:
        shown = f"parallel.pipeline={pipeline}"
        if virtual is not None:
            shown += f" x parallel.virtual_pipeline={virtual} = {chunks}"
        yield (
            f"{shown}: must divide the model's {shape.layers} layers. "
            f"Use {_divisors(shape.layers)}."
        )


def _expert_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    parallel = config.parallel
    expert, expert_tensor = parallel.expert, parallel.expert_tensor_size
    if not shape.is_moe:
        if expert > 1:
            yield f"parallel.expert={expert}: the model at model.path has no experts; must be 1."
        if parallel.expert_tensor not in (None, parallel.tensor):
            yield (
                f"parallel.expert_tensor={parallel.expert_tensor}: the model at model.path has no "
                "experts. Leave it out."
            )
        return
    if shape.experts % expert:
        yield (
            f"parallel.expert={expert}: must divide the model's {shape.experts} experts. "
            f"Use {_divisors(shape.experts)}."
        )
    if shape.expert_ffn % expert_tensor:
        yield (
            f"parallel.expert_tensor={expert_tensor}: must divide the experts' "
            f"moe_intermediate_size {shape.expert_ffn}."
        )
    ranks = parallel.tensor * parallel.context * parallel.data
    if ranks % (expert * expert_tensor):
        yield (
            f"parallel.expert={expert} x expert_tensor={expert_tensor}: must divide tensor x "
            f"context x data = {ranks}, the ranks that the experts are spread over."
        )


def pack_multiple(config: RunConfig) -> int:
    """Packed lengths are multiples of this: zig-zag halves, tensor shards and FP8 blocks."""
    parallel = config.parallel
    shards = parallel.context * (parallel.tensor if parallel.uses_sequence_parallel else 1)
    zigzag = 2 * parallel.context if parallel.context > 1 else 1
    return math.lcm(zigzag, shards * config.precision.block_tokens)


def _pack_problems(config: RunConfig) -> Iterator[str]:
    multiple, budget = pack_multiple(config), config.training.tokens_per_micro_batch
    if budget % multiple:
        yield (
            f"training.tokens_per_micro_batch={budget}: must be a multiple of {multiple} (context "
            f"{config.parallel.context}, tensor {config.parallel.tensor}, precision.fp8="
            f"{config.precision.fp8}). Use {-(-budget // multiple) * multiple}."
        )


def _device_problems(config: RunConfig) -> Iterator[str]:
    parallel, rollout = config.parallel, config.rollout
    world, nodes = parallel.world_size, parallel.nodes
    if world % nodes:
        yield (
            f"parallel.nodes={nodes}: must divide the world size tensor {parallel.tensor} x "
            f"pipeline {parallel.pipeline} x context {parallel.context} x data {parallel.data} = "
            f"{world}."
        )
        return
    if config.device == "cuda" and not rollout.endpoints:
        yield from _engine_device_problems(config, world // nodes)


def _engine_device_problems(config: RunConfig, devices_per_node: int) -> Iterator[str]:
    """Engines that the run starts live on the machine of trainer rank 0."""
    rollout = config.rollout
    devices = rollout.engines * rollout.engine_tensor
    shown = (
        f"rollout.engines={rollout.engines} x rollout.engine_tensor={rollout.engine_tensor} = "
        f"{devices} devices"
    )
    if rollout.placement == "colocated" and devices > devices_per_node:
        yield (
            f"{shown}: colocated engines share the {devices_per_node} trainers' devices of the "
            "first node. Lower one, or use rollout.placement=disaggregated on one node."
        )
    if rollout.placement == "disaggregated" and config.parallel.nodes > 1:
        yield (
            f"rollout.placement=disaggregated with parallel.nodes={config.parallel.nodes}: engines "
            "run on the first node beside its trainers. Use colocated, or one node."
        )


def _precision_problems(config: RunConfig) -> Iterator[str]:
    precision, fp8 = config.precision, config.precision.fp8
    if fp8 == "none":
        for name in ("fp8_param_gather", "first_last_layers_bf16"):
            if name in precision.model_fields_set and precision.model_dump()[name]:
                yield f"precision.{name}=true: needs precision.fp8, which is none. Leave it out."
        return
    if config.model.dtype == "float32":
        yield (
            f"precision.fp8={fp8} with model.dtype=float32: FP8 layers keep their masters and "
            "activations beside bfloat16. Use model.dtype=bfloat16."
        )
    if config.device == "cpu":
        yield f"precision.fp8={fp8}: needs device=cuda; must be none on CPU."
    if precision.fp8_format == "hybrid" and fp8 in ("blockwise", "mxfp8"):
        yield f"precision.fp8_format=hybrid: precision.fp8={fp8} takes e4m3 only."
    if precision.first_last_layers_bf16 and fp8 in ("delayed", "mxfp8"):
        yield (
            f"precision.first_last_layers_bf16=true: only with precision.fp8=tensorwise or "
            f"blockwise, which is {fp8}."
        )
    if precision.fp8_param_gather and not config.parallel.distributed_optimizer:
        yield (
            "precision.fp8_param_gather=true: gathers what the distributed optimizer shards, so "
            "it needs parallel.distributed_optimizer=true."
        )


def _fp8_dimension_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    if config.precision.fp8 == "none":
        return
    tensor = config.parallel.tensor
    sizes = {
        "hidden_size": shape.hidden,
        "intermediate_size / tensor": shape.ffn / tensor,
        "query heads x head_dim / tensor": shape.heads * shape.head_dim / tensor,
    }
    if shape.is_moe:
        expert = shape.expert_ffn / config.parallel.expert_tensor_size
        sizes["moe_intermediate_size / expert_tensor"] = expert
    for name, size in sizes.items():
        if size % FP8_DIMENSION:
            yield (
                f"precision.fp8={config.precision.fp8}: {name} = {size:g} must be a multiple of "
                f"{FP8_DIMENSION}. Lower parallel.tensor, or use precision.fp8=none."
            )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
