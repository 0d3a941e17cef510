"""The three ways to write the parameters of a vLLM module: in place, rebuilt, by vLLM's loader.

Kernels may keep weights in a layout of their own: on CPU, oneDNN packs every linear layer and
frees the weight, fused experts are packed in place, and heads keep a packed copy beside the
weight; GPU kernels may lay out FP8 matrices and their scales anew. vLLM's layerwise reload brings
single modules back into the checkpoint's layout and then lets the kernel take them over again. The
functions of it that vLLM does not export are used where they are found; where not, vLLM's own
loader gets the same weights as Hugging Face tensors.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from megatron_dapo.resharding.boxes import Placement
from megatron_dapo.resharding.digest import as_matrix
from megatron_dapo.resharding.receive import Way

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_RELOAD = "vllm.model_executor.model_loader.reload"


@dataclass(frozen=True)
class Reload:
    """The steps of vLLM's layerwise reload that it does not export, for one module."""

    info: Callable[[nn.Module], object]
    materialize: Callable[[nn.Module, object], None]
    process: Callable[[nn.Module, object], None]


def find_reload() -> Reload | None:
    """The steps, if this vLLM has them in the form that we know."""
    wanted = {
        "info": (f"{_RELOAD}.layerwise", "get_layerwise_info", ["layer"]),
        "materialize": (f"{_RELOAD}.meta", "materialize_layer", ["layer", "info"]),
        "process": (f"{_RELOAD}.layerwise", "_layerwise_process", ["layer", "info"]),
    }
    found: dict[str, Callable[..., None]] = {}
    for step, (place, name, arguments) in wanted.items():
        try:
            function = vars(importlib.import_module(place)).get(name)
        except ImportError:
            return None
        if function is None or list(inspect.signature(function).parameters) != arguments:
            return None
        found[step] = function
    return Reload(**found)


@dataclass(eq=False)
class LivePart:
    """Parameters that are written in place."""

    module: nn.Module
    names: Mapping[str, str]
    """Target -> its name in the module."""
    targets: Mapping[str, tuple[int, ...]]
    repacked: tuple[nn.Module, ...] = ()
    """Modules that keep a packed copy of what is written."""
    way: Way = "live"

    def open(self) -> Mapping[str, Tensor]:
        return {target: getattr(self.module, name) for target, name in self.names.items()}

    def close(self) -> None:
        for module in self.repacked:
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]


@dataclass(eq=False)
class RebuiltPart:
    """Parameters of one module that its kernel keeps in another layout."""

    module: nn.Module
    names: Mapping[str, str]
    targets: Mapping[str, tuple[int, ...]]
    model_config: ModelConfig
    reload: Reload
    way: Way = "rebuilt"

    def open(self) -> Mapping[str, Tensor]:
        initialize_layerwise_reload(self.module)
        info = self.reload.info(self.module)
        self.reload.materialize(self.module, info)
        for name, buffer in info.kernel_tensors[1].items():  # type: ignore[attr-defined]
            rebuilt = self.module._buffers.get(name)
            if rebuilt is not None and rebuilt is not buffer and rebuilt.shape == buffer.shape:
                rebuilt.copy_(buffer)  # tables such as an expert map, which no weight brings
        return {target: getattr(self.module, name) for target, name in self.names.items()}

    def close(self) -> None:
        self.reload.process(self.module, self.reload.info(self.module))
        finalize_layerwise_reload(self.module, self.model_config)
        repack_cpu_experts(self.module)


@dataclass(eq=False)
class LoaderPart:
    """Parameters that vLLM's own loader fills, from full Hugging Face tensors.

    These are put together here: this rank holds a part of each, which is the part that the loader
    reads. Scales of FP8 matrices are tensors of their own, as in FP8 checkpoints.
    """

    model: nn.Module
    path: str
    """Of the module that all targets belong to."""
    targets: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    """Of the targets."""
    device: torch.device
    model_config: ModelConfig
    placements: tuple[Placement, ...]
    """Where Hugging Face tensors lie in the targets."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of those Hugging Face tensors."""
    way: Way = "loader"
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    def open(self) -> Mapping[str, Tensor]:
        self._tensors = self._empty(self.targets, self.dtypes)
        return self._tensors

    def close(self) -> None:
        tensors = self._hf_tensors()
        module = self.model.get_submodule(self.path)
        initialize_layerwise_reload(module)
        loaded: set[str] = self.model.load_weights(_each_once(tensors))  # type: ignore[operator]
        finalize_layerwise_reload(module, self.model_config)
        self._tensors = {}
        if left := sorted(set(self.targets) - loaded):
            raise RuntimeError(
                f"vLLM's loader did not fill {left[0]!r}, which would keep values of earlier "
                "weights; it does not load this model as resharding.engine_map says"
            )
        repack_cpu_experts(module)

    def _hf_tensors(self) -> dict[str, Tensor]:
        dtypes = {place.tensor: self.dtypes[place.parameter] for place in self.placements}
        full = self._empty(self.shapes, dtypes)
        for place in self.placements:
            box = place.part
            source = as_matrix(self._tensors[place.parameter])
            target = as_matrix(full[place.tensor])
            target[box.row : box.row + box.rows, box.col : box.col + box.cols].copy_(
                source[place.row : place.row + box.rows, place.col : place.col + box.cols]
            )
        return full

    def _empty(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, Tensor]:
        return {
            name: torch.empty(shape, dtype=dtypes[name], device=self.device)
            for name, shape in shapes.items()
        }


def _each_once(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor, let go when the next is asked for."""
    for name in list(tensors):
        yield name, tensors.pop(name)


def repack_cpu_experts(model: nn.Module) -> None:
    """Bring fused MoE weights back into the layout of the CPU kernel after a reload.

    vLLM's layerwise reload leaves them in the checkpoint's layout, which the kernel would read
    as garbage without an error. Dense models and other devices are left alone.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts) and module.w13_weight.device.type == "cpu":
            kernel = module.quant_method.moe_kernel
            if kernel is None:
                raise RuntimeError(
                    f"{type(module.quant_method).__name__} has no kernel to repack for"
                )
            kernel.fused_experts.process_weights_after_loading(module)
