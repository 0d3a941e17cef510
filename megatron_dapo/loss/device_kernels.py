"""Which kernels visit rows on a device: Triton's where it can run them, else plain torch."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from megatron_dapo import device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def device_kernels(*rows: Tensor) -> ModuleType | None:
    """`loss.triton_kernels` if it takes all of these [rows, width]; None: visit with torch."""
    fits = all(each.is_cuda and each.dtype in DTYPES and each.stride(1) == 1 for each in rows)
    return _triton_kernels() if fits else None


@cache
def _triton_kernels() -> ModuleType | None:
    if not device.has_triton():
        return None
    return importlib.import_module("megatron_dapo.loss.triton_kernels")
