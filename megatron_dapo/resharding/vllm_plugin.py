"""Loaded by vLLM in each of its processes (entry point `vllm.general_plugins`).

Registers the weight-transfer backend "megatron_dapo" through vLLM's own registry: the trainer
publishes the policy as one safetensors file in shared memory, every engine worker maps the file
and loads its part of it. Nothing of vLLM is patched, and nothing else of this package imports
this module, so that the package works without vLLM.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "megatron_dapo"
GUARDED = "MEGATRON_DAPO_GUARDED"
"""Environment variable of servers that we started: their processes die with their parents."""
PR_SET_PDEATHSIG = 1


def register() -> None:
    """Make the backend known to this vLLM process; safe to call again."""
    if os.environ.get(GUARDED) == "1":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """`init_info` of /init_weight_transfer_engine."""

    directory: str
    """The only directory that weights may be read from."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """`update_info` of /update_weights: one published file."""

    path: str
    """Safetensors file with Hugging Face names and full (not sharded) tensors."""
    policy_version: int
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors, without the file's header."""


def check_path(path: str, directory: Path | None) -> Path:
    """`path` resolved, if it is a file inside `directory`.

    Raises:
        RuntimeError: no directory was named yet.
        ValueError: the path leads elsewhere, also by a link or by "..".
    """
    if directory is None:
        raise RuntimeError(
            "update_weights before init_weight_transfer_engine: name the directory of the "
            "published weights first"
        )
    resolved = Path(path).resolve()
    if resolved.parent != directory or not resolved.is_file():
        raise ValueError(
            f"weights at {path!r} are not a file of {str(directory)!r}, the directory that "
            "init_weight_transfer_engine named; publish there"
        )
    return resolved


def read_tensors(path: Path, *, num_tensors: int, num_bytes: int) -> dict[str, Tensor]:
    """All tensors of the file by name, mapped, not copied.

    Raises:
        ValueError: their number or size is not what the trainer says that it published.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = len(tensors), sum(tensor.nbytes for tensor in tensors.values())
    if found != (num_tensors, num_bytes):
        raise ValueError(
            f"{path} holds {found[0]} tensors with {found[1]} bytes, published were "
            f"{num_tensors} with {num_bytes}; the file is incomplete or of another update"
        )
    return tensors


def repack_cpu_experts(model: nn.Module) -> None:
    """Bring fused MoE weights back into the layout of the CPU kernel after a reload.

    vLLM's layerwise reload leaves them in the checkpoint's layout, which the kernel would read
    as garbage without an error. Dense models and other devices are left alone.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts) and module.w13_weight.device.type == "cpu":
            kernel = module.quant_method.moe_kernel
            if kernel is None:
                raise RuntimeError(
                    f"{type(module.quant_method).__name__} has no kernel to repack for"
                )
            kernel.fused_experts.process_weights_after_loading(module)


def tied_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Parameters that an earlier module owns too, by name: a head tied to the embedding.

    No published tensor has their name. Ask before a reload starts: during one every module has
    parameters of its own.
    """
    owned: set[int] = set()
    tied: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in owned:
                tied[f"{path}.{name}"] = module
            owned.add(id(parameter))
    return tied


def repack_cpu_heads(tied: Iterable[nn.Module]) -> None:
    """Bring tied heads up to date with the embedding that they share their weights with.

    vLLM's layerwise reload loads nothing into them and so keeps what the CPU kernel packed from
    the old weights, without an error.
    """
    for module in tied:
        if module.weight.device.type == "cpu":
            module.quant_method.process_weights_after_loading(module)  # type: ignore


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Engine side of the transfer, one in each worker; tensor parallelism slices while loading."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate
    supports_draft_weight_update = False
    directory: Path | None = None
    _missing: set[str] = set()  # noqa: RUF012
    _tied: Mapping[str, nn.Module] = MappingProxyType({})

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        directory = Path(init_info.directory).resolve()
        if not directory.is_dir():
            raise ValueError(f"weights directory {init_info.directory!r} does not exist here")
        self.directory = directory

    def start_weight_update(self) -> None:
        """Back to the checkpoint's layout, in which weights can be loaded."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._tied = tied_parameters(self.model)
        initialize_layerwise_reload(self.model)
        self._missing = {name for name, _ in self.model.named_parameters()} - set(self._tied)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load one published file (the base class would also wait for an accelerator)."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        path = check_path(update_info.path, self.directory)
        tensors = read_tensors(
            path, num_tensors=update_info.num_tensors, num_bytes=update_info.num_bytes
        )
        loaded: set[str] = self.model.load_weights(in_layer_order(tensors))  # type: ignore[operator]
        self._missing -= loaded

    def finish_weight_update(self) -> None:
        """Into the kernels' layout, once every parameter has been loaded.

        Raises:
            RuntimeError: parameters were not in the published files; vLLM itself would keep
                their old values and only log a warning.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._missing:
            raise RuntimeError(
                f"weight update without {len(self._missing)} parameters of the engine's model, "
                f"among them {sorted(self._missing)[:3]}; publish the whole model"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        repack_cpu_experts(self.model)
        repack_cpu_heads(self._tied.values())

    def shutdown(self) -> None:
        self.directory = None


def in_layer_order(tensors: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Pairs grouped by layer, so that few layers are half loaded at any time."""
    from vllm.distributed.weight_transfer.base import layerwise_groups

    for names in layerwise_groups(list(tensors)):
        for name in names:
            yield name, tensors[name]
