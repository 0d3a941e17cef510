"""Which transport carries the weights, and combinations of settings that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron_dapo.config.model_shape import ModelShape
from megatron_dapo.config.schema import ReshardingConfig, RunConfig

NEEDS_CUDA = ("nccl", "cuda_ipc", "vllm_nccl", "vllm_ipc", "vllm_nccl_m2n")
SHARES_DEVICES = ("cuda_ipc", "vllm_ipc")
"""Trainer and engine work on the same GPUs."""
OWN_DEVICES = ("nccl", "vllm_nccl", "vllm_nccl_m2n")
"""NCCL takes no two ranks on one GPU."""
FP8_BLOCK = 128


def chosen_transport(config: RunConfig, device: Literal["cpu", "cuda"]) -> str:
    """`resharding.transport`, with auto replaced by what suits device and placement."""
    transport = config.resharding.transport
    if transport != "auto":
        return transport
    if device == "cpu":
        return "files"
    if config.rollout.placement == "disaggregated":
        return "nccl"
    return "cuda_ipc" if config.parallel.nodes == 1 else "files"


def resharding_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Whatever would keep the weights from reaching the engines, or from being checked there.

    With device=auto only what fails on every device.
    """
    yield from _transport_problems(config)
    yield from _quantization_problems(config, shape)
    yield from _cut_problems(config, shape)
    settings, default = config.resharding, ReshardingConfig()
    if settings.probe_tokens == 0 and settings.probe_tolerance is not None:
        yield (
            f"resharding.probe_tolerance={settings.probe_tolerance}: not read with "
            f"resharding.probe_tokens=0. Leave it out, or set probe_tokens={default.probe_tokens}."
        )


def _transport_problems(config: RunConfig) -> Iterator[str]:
    transport, placement = config.resharding.transport, config.rollout.placement
    seen = f"resharding.transport={transport}"
    if transport in NEEDS_CUDA and config.device == "cpu":
        yield (
            f"{seen}: moves memory of GPUs, and device=cpu. Allowed there are files and gloo; "
            "leave it out for files."
        )
        return
    if transport == "gloo" and config.device == "cuda":
        yield (
            f"{seen}: moves memory of the CPU, and device=cuda. Allowed there are nccl, cuda_ipc, "
            "files and vLLM's own; leave it out to have the one that suits rollout.placement."
        )
    if transport in SHARES_DEVICES and placement == "disaggregated":
        yield (
            f"{seen}: engines must work on the trainers' GPUs, and rollout.placement="
            "disaggregated. Use nccl, or rollout.placement=colocated."
        )
    if transport in SHARES_DEVICES and config.parallel.nodes > 1:
        yield (
            f"{seen}: memory of a GPU cannot be opened on another machine, and parallel.nodes="
            f"{config.parallel.nodes}. Use files (run_dir must lie on a shared file system), or "
            "nccl with rollout.placement=disaggregated."
        )
    if transport in OWN_DEVICES and placement == "colocated":
        yield (
            f"{seen}: NCCL takes no two ranks on one GPU, and rollout.placement=colocated. Use "
            "cuda_ipc or files, or rollout.placement=disaggregated."
        )


def _quantization_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine_quantization is None:
        return
    seen = f"rollout.engine_quantization={rollout.engine_quantization}"
    if config.device == "cpu":
        yield f"{seen}: engines on CPU have no FP8 kernels, and device=cpu. Leave it out."
    dtype = config.model.dtype if rollout.engine_dtype == "auto" else rollout.engine_dtype
    if dtype == "float32":
        yield (
            f"{seen}: engines compute in bfloat16 around FP8 matrices, and rollout.engine_dtype is "
            "float32. Set rollout.engine_dtype=bfloat16."
        )
    for name, size in (("hidden_size", shape.hidden), ("intermediate_size", shape.ffn)):
        if size % (FP8_BLOCK * (rollout.engine_tensor if name == "intermediate_size" else 1)):
            yield (
                f"{seen}: scales are for blocks of {FP8_BLOCK} x {FP8_BLOCK}, which {name}={size} "
                f"of the model with rollout.engine_tensor={rollout.engine_tensor} does not fill. "
                "Leave it out, or use another engine_tensor."
            )


def _cut_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    ranks = config.rollout.engine_tensor
    seen = f"rollout.engine_tensor={ranks}"
    if shape.heads % ranks:
        return  # said by the rules of the engines
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        yield (
            f"{seen}: must divide the model's {shape.kv_heads} key/value heads, or be a multiple "
            "of them."
        )
    name, size = "intermediate_size", shape.ffn
    if shape.is_moe:
        name, size = "moe_intermediate_size", shape.expert_ffn
    if size % ranks:
        yield f"{seen}: must divide the model's {name}={size}. Use a divisor."
