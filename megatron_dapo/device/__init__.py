"""The device that this process computes on, and what it can do."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from megatron_dapo.device.cpu_shim import install_cpu_support

__all__ = [
    "backend",
    "current",
    "has_fp8",
    "has_transformer_engine",
    "has_triton",
    "install_cpu_support",
    "release_cached_memory",
    "select",
]

FP8_CAPABILITY = (8, 9)
"""First CUDA compute capability with FP8 tensor cores (Ada; Hopper is 9.0)."""


def current() -> torch.device:
    """The CUDA device made current by `select`, or the CPU where there is no CUDA device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def select(kind: Literal["auto", "cpu", "cuda"], *, local_rank: int) -> torch.device:
    """Make the device of this rank current and return it.

    Args:
        kind: `device` of the configuration.
        local_rank: place of this rank on its machine; rank r takes CUDA device r.

    Raises:
        ValueError: the configuration and the visible devices contradict each other.
    """
    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise ValueError("device=cuda: this machine shows no CUDA device. Set device=auto or cpu.")
    if kind == "cpu" and available:
        raise ValueError(
            f"device=cpu: {torch.cuda.device_count()} CUDA devices are visible, and Megatron-core "
            "would use them. Hide them with CUDA_VISIBLE_DEVICES= or set device=auto."
        )
    if available:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank}: only {torch.cuda.device_count()} CUDA devices are "
                "visible. Start one task per device."
            )
        torch.cuda.set_device(local_rank)
    return current()


def backend() -> Literal["nccl", "gloo"]:
    """Communication backend of the training collectives on this device."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def release_cached_memory() -> None:
    """Give memory that torch holds but does not use back to the CUDA device; nothing on CPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def has_transformer_engine() -> bool:
    """True where Transformer Engine is installed and has a device to run on."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def has_triton() -> bool:
    """True where Triton is installed (a CUDA torch brings it) and has a device to run on."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def has_fp8() -> bool:
    """True where FP8 layers can run: Transformer Engine on an Ada, Hopper or newer device."""
    return has_transformer_engine() and torch.cuda.get_device_capability() >= FP8_CAPABILITY
