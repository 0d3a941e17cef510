"""The three ways to write the parameters of a vLLM module: in place, rebuilt, by vLLM's loader.

Kernels may keep weights in a layout of their own: on CPU, oneDNN packs every linear layer and
frees the weight, fused experts are packed in place, and heads keep a packed copy beside the
weight. vLLM's layerwise reload brings single modules back into the checkpoint's layout and then
lets the kernel take them over again. The functions of it that vLLM does not export are used where
they are found; where not, vLLM's own loader gets the same weights as Hugging Face tensors.
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
from megatron_dapo.resharding.quantize import quantized
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

    Targets are either such tensors, as they arrive, or parameters whose Hugging Face tensors are
    put together here. This rank holds a part of those, which is the part that the loader reads.
    Matrices for an engine in FP8 become values and scales here.
    """

    model: nn.Module
    path: str
    """Of the module in the model."""
    targets: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    model_config: ModelConfig
    placements: tuple[Placement, ...] = ()
    """Where Hugging Face tensors lie in the targets; none where targets are such tensors."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of those Hugging Face tensors."""
    in_fp8: bool = False
    way: Way = "loader"
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    def open(self) -> Mapping[str, Tensor]:
        self._tensors = self._empty(self.targets)
        return self._tensors

    def close(self) -> None:
        tensors = self._hf_tensors() if self.placements else self._tensors
        module = self.model.get_submodule(self.path)
        initialize_layerwise_reload(module)
        wanted = self._to_be_filled(module)
        loaded: set[str] = self.model.load_weights(self._named(tensors))  # type: ignore[operator]
        finalize_layerwise_reload(module, self.model_config)
        self._tensors = {}
        if left := sorted(wanted - loaded):
            raise RuntimeError(
                f"vLLM's loader did not fill {left[0]!r}, which would keep values of earlier "
                "weights; it does not load this model as resharding.engine_map says"
            )
        repack_cpu_experts(module)

    def _to_be_filled(self, module: nn.Module) -> set[str]:
        """Parameters in the layout of the checkpoint that the loader must report as loaded."""
        if self.placements:
            return set(self.targets)
        return {f"{self.path}.{name}" for name, _ in module.named_parameters(recurse=False)}

    def _named(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, let go when the next is asked for."""
        for name in list(tensors):
            tensor = tensors.pop(name)
            if self.in_fp8 and tensor.dim() == 2:
                yield from quantized([(name, tensor)])
            else:
                yield name, tensor

    def _hf_tensors(self) -> dict[str, Tensor]:
        full = self._empty(self.shapes)
        for place in self.placements:
            box = place.part
            source = as_matrix(self._tensors[place.parameter])
            target = as_matrix(full[place.tensor])
            target[box.row : box.row + box.rows, box.col : box.col + box.cols].copy_(
                source[place.row : place.row + box.rows, place.col : place.col + box.cols]
            )
        return full

    def _empty(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {
            name: torch.empty(shape, dtype=self.dtype, device=self.device)
            for name, shape in shapes.items()
        }


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
