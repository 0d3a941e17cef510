"""Which transport carries the weights, and combinations of settings that cannot work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from megatron_dapo.config.model_shape import ModelShape
from megatron_dapo.config.schema import ReshardingConfig, RunConfig

VllmBackend = Literal["nccl", "ipc", "nccl_m2n"]
VLLM_BACKENDS: Mapping[str, VllmBackend] = {
    "vllm_nccl": "nccl",
    "vllm_ipc": "ipc",
    "vllm_nccl_m2n": "nccl_m2n",
}
"""vLLM's own backends: `resharding.transport` -> what vLLM calls it. They move full tensors or
shards, not messages of the plan, and bring nothing to compare afterwards."""
NEEDS_CUDA = ("nccl", "cuda_ipc", *VLLM_BACKENDS)
SHARES_DEVICES = ("cuda_ipc", "vllm_ipc")
"""Trainer and engine work on the same GPUs."""
OWN_DEVICES = ("nccl", "vllm_nccl", "vllm_nccl_m2n")
"""NCCL takes no two ranks on one GPU."""
MEETS_ON_LOOPBACK = ("vllm_nccl", "vllm_nccl_m2n")
"""Trainers and engines meet at a port of 127.0.0.1 that vLLM does not guard."""
FP8_BLOCK = 128
M2N_MOST_SOURCES = 16
"""Trainer ranks that one engine rank may take a tensor from (a limit of NCCL's reshard)."""


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
    if config.resharding.transport == "vllm_nccl_m2n":
        yield from _m2n_problems(config)
    yield from _quantization_problems(config, shape)
    yield from _cut_problems(config, shape)
    settings, default = config.resharding, ReshardingConfig()
    if settings.probe_tokens == 0 and settings.probe_tolerance is not None:
        yield (
            f"resharding.probe_tolerance={settings.probe_tolerance}: not read with "
            f"resharding.probe_tokens=0. Leave it out, or set probe_tokens={default.probe_tokens}."
        )
    if settings.probe_tokens == 0 and settings.transport in VLLM_BACKENDS:
        yield (
            f"resharding.probe_tokens=0: resharding.transport={settings.transport} brings no "
            "digests, so nothing would show that the engines hold the policy. Set probe_tokens="
            f"{default.probe_tokens}."
        )
    elif settings.probe_tokens == 0 and not settings.verify_digests:
        yield (
            "resharding.probe_tokens=0: with resharding.verify_digests=false nothing would show "
            "that the engines hold the policy. Set verify_digests=true, or probe_tokens="
            f"{default.probe_tokens}."
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
    if transport in MEETS_ON_LOOPBACK and config.parallel.nodes > 1:
        yield (
            f"{seen}: trainers and engines meet on 127.0.0.1, which other machines do not reach, "
            f"and parallel.nodes={config.parallel.nodes}. Use files (run_dir must lie on a shared "
            "file system), or one machine."
        )


def _m2n_problems(config: RunConfig) -> Iterator[str]:
    """What one mesh of replicas x tensor ranks a side cannot describe."""
    layout, rollout = config.parallel, config.rollout
    rest = "Use resharding.transport=nccl or vllm_nccl."
    seen = "resharding.transport=vllm_nccl_m2n and"
    if layout.pipeline > 1:
        yield (
            f"{seen} parallel.pipeline={layout.pipeline}: every rank must hold a part of every "
            f"tensor; a pipeline stage holds some layers only. {rest}"
        )
    if layout.expert > 1:
        yield (
            f"{seen} parallel.expert={layout.expert}: every rank must hold a part of every "
            f"tensor; with expert parallelism it holds some experts only. {rest}"
        )
    if layout.expert_tensor_size not in (1, layout.tensor):
        yield (
            f"{seen} parallel.expert_tensor={layout.expert_tensor_size}: experts would need "
            f"another mesh than parallel.tensor={layout.tensor}; allowed are that and 1. {rest}"
        )
    if layout.tensor > M2N_MOST_SOURCES:
        yield (
            f"{seen} parallel.tensor={layout.tensor}: a tensor may come from at most "
            f"{M2N_MOST_SOURCES} ranks. {rest}"
        )
    if rollout.engines > 1:
        yield (
            f"{seen} rollout.engines={rollout.engines}: vLLM's receivers number themselves within "
            f"one engine. {rest}"
        )
    if rollout.engine_quantization is not None:
        yield (
            f"{seen} rollout.engine_quantization={rollout.engine_quantization}: shards of the "
            f"trainer are not cut at blocks of {FP8_BLOCK}. {rest}"
        )


def _quantization_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine_quantization is None:
        return
    seen = f"rollout.engine_quantization={rollout.engine_quantization}"
    if config.device == "cpu":
        yield f"{seen}: engines on CPU have no FP8 kernels, and device=cpu. Leave it out."
    if config.engine_dtype == "float32":
        yield (
            f"{seen}: engines compute in bfloat16 around FP8 matrices, and rollout.engine_dtype is "
            "float32. Set rollout.engine_dtype=bfloat16."
        )
    ranks = rollout.engine_tensor
    for name, size in _cut_sizes(shape, ranks).items():
        if size % FP8_BLOCK:
            yield (
                f"{seen}: scales are for blocks of {FP8_BLOCK} x {FP8_BLOCK}, which the {size} of "
                f"{name} on a rank of rollout.engine_tensor={ranks} do not fill. Leave it out, or "
                "use another engine_tensor."
            )


def _cut_sizes(shape: ModelShape, ranks: int) -> dict[str, int]:
    """Rows or columns of the matrices on one engine rank, that blocks must fill."""
    ffn, name = shape.ffn, "intermediate_size"
    if shape.is_moe:
        ffn, name = shape.expert_ffn, "moe_intermediate_size"
    return {
        "hidden_size": shape.hidden,
        name: ffn // ranks,
        # Query heads are a multiple of these.
        "the key heads (num_key_value_heads x head_dim)": (
            max(shape.kv_heads // ranks, 1) * shape.head_dim
        ),
    }


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
