"""How vLLM keeps the parameters that a plan writes: which in place, which through a rebuild.

Kernels may keep weights in a layout of their own: on CPU, oneDNN packs every linear layer and
frees the weight, fused experts are packed in place, and heads keep a packed copy beside the
weight. vLLM's layerwise reload brings single modules back into the checkpoint's layout and then
lets the kernel take them over again. The functions of it that vLLM does not export are used where
they are found; where not, vLLM's own loader gets the same weights as Hugging Face tensors.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from megatron_dapo.resharding.boxes import Placement
from megatron_dapo.resharding.digest import as_matrix
from megatron_dapo.resharding.messages import DTYPES
from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.receive import Part, Way

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_RELOAD = "vllm.model_executor.model_loader.reload"
ALWAYS_LIVE = "bias"
"""Parameters of this name stay in place through a layerwise reload."""


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
        self.reload.materialize(self.module, self.reload.info(self.module))
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
    """

    model: nn.Module
    module: nn.Module
    targets: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    model_config: ModelConfig
    placements: tuple[Placement, ...] = ()
    """Where Hugging Face tensors lie in the targets; none where targets are such tensors."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of those Hugging Face tensors."""
    way: Way = "loader"
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    def open(self) -> Mapping[str, Tensor]:
        self._tensors = self._empty(self.targets)
        return self._tensors

    def close(self) -> None:
        tensors = self._hf_tensors() if self.placements else self._tensors
        initialize_layerwise_reload(self.module)
        loaded: set[str] = self.model.load_weights(iter(tensors.items()))  # type: ignore[operator]
        finalize_layerwise_reload(self.module, self.model_config)
        self._tensors = {}
        if self.placements and (left := sorted(self.targets.keys() - loaded)):
            raise RuntimeError(f"vLLM's loader did not fill {left[0]!r}")
        repack_cpu_experts(self.module)

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


def find_parts(
    model: nn.Module,
    model_config: ModelConfig,
    plan: ReshardPlan,
    tensor_rank: int,
    device: torch.device,
) -> list[Part]:
    """A part for every target of the plan on this rank, checked against the live model.

    Raises:
        ValueError: a parameter of the plan that the model does not have, one of the model that the
            plan does not write, another shape or dtype, or a module whose layout is unknown.
    """
    return _Search(model, model_config, plan, tensor_rank, device).parts()


class _Search:
    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        plan: ReshardPlan,
        tensor_rank: int,
        device: torch.device,
    ) -> None:
        self.model, self.model_config, self.device = model, model_config, device
        self.plan, self.tensor_rank = plan, tensor_rank
        self.dtype = DTYPES[plan.engine.dtype]
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.reload = find_reload()
        self.loader_modules = loader_modules(plan)

    def parts(self) -> list[Part]:
        parts: list[Part] = []
        by_module: dict[str, dict[str, tuple[int, ...]]] = {}
        for target, shape in self.plan.parameters(self.tensor_rank).items():
            path = target.rpartition(".")[0]
            if path not in self.modules:
                raise ValueError(f"the engine's model has no {target!r}, which the plan writes")
            by_module.setdefault(path, {})[target] = shape
        for path, targets in by_module.items():
            parts += self._direct(path, targets)
        parts += self._through_loader()
        self._check_all_written(by_module)
        return parts

    def _direct(self, path: str, targets: dict[str, tuple[int, ...]]) -> list[Part]:
        """Parts of one module: what is live, and the rest."""
        module = self.modules[path]
        live = {t: s for t, s in targets.items() if self._is_live(module, _last(t), s)}
        rest = {t: s for t, s in targets.items() if t not in live}
        parts: list[Part] = []
        if live:
            names = {target: _last(target) for target in live}
            for target, name in names.items():
                self._check_live(target, getattr(module, name), live[target])
            parts.append(LivePart(module, names, live, self._repacked(module)))
        if rest:
            names = {target: _last(target) for target in rest}
            self._check_rest(path, module, names, rest)
            parts.append(self._rebuilt(module, names, rest))
        return parts

    def _is_live(self, module: nn.Module, name: str, shape: tuple[int, ...]) -> bool:
        method = _quant_method(module)
        if method is None or name == ALWAYS_LIVE or isinstance(method, UnquantizedEmbeddingMethod):
            return True
        # A packed linear layer has given its weight up; its shape says so.
        return isinstance(method, UnquantizedLinearMethod) and (
            tuple(getattr(module, name).shape) == shape
        )

    def _check_live(self, target: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        exact = torch.promote_types(tensor.dtype, self.dtype) == tensor.dtype
        if tuple(tensor.shape) != shape or not exact or not tensor.is_contiguous():
            raise ValueError(
                f"{target!r} is {tuple(tensor.shape)} {tensor.dtype} in the engine, planned is "
                f"{shape} {self.dtype}; start the engine with the dtype and the model of the run"
            )

    def _check_rest(
        self,
        path: str,
        module: nn.Module,
        names: Mapping[str, str],
        targets: Mapping[str, tuple[int, ...]],
    ) -> None:
        method = _quant_method(module)
        if not isinstance(method, UnquantizedLinearMethod | UnquantizedFusedMoEMethod):
            raise ValueError(
                f"{path!r} keeps its weights as {type(method).__name__} does, a layout that is not "
                "known here; the plan must send it as full tensors (rollout.engine_quantization)"
            )
        for target, name in names.items():
            live = getattr(module, name)
            if live.numel() and tuple(live.shape) != targets[target]:
                raise ValueError(
                    f"{target!r} is {tuple(live.shape)} in the engine, planned is "
                    f"{targets[target]}; the engine serves another model, or its kernel pads the "
                    "weights, which vLLM cannot reload"
                )
            if live.dtype != self.dtype:
                raise ValueError(
                    f"{target!r} is {live.dtype} in the engine, planned is {self.dtype}; start "
                    "the engine with the dtype of the run"
                )

    def _rebuilt(
        self, module: nn.Module, names: Mapping[str, str], targets: Mapping[str, tuple[int, ...]]
    ) -> Part:
        if self.reload is None:
            return self._assembled(module, targets)
        part = RebuiltPart(module, names, targets, self.model_config, self.reload)
        recorded = self.reload.info(module).restore_metadata[0]  # type: ignore[attr-defined]
        for target, name in names.items():
            if name not in recorded or tuple(recorded[name].shape) != targets[target]:
                found = tuple(recorded[name].shape) if name in recorded else "not recorded"
                raise ValueError(
                    f"{target!r} is {found} in the layout of the checkpoint, planned is "
                    f"{targets[target]}; the engine serves another model"
                )
        return part

    def _assembled(self, module: nn.Module, targets: Mapping[str, tuple[int, ...]]) -> Part:
        """The same targets for vLLM's loader, as Hugging Face tensors."""
        placements = tuple(
            place
            for place in self.plan.map.placements(self.tensor_rank)
            if place.parameter in targets
        )
        full = self.plan.family.hf_tensors
        return LoaderPart(
            self.model,
            module,
            targets,
            self.dtype,
            self.device,
            self.model_config,
            placements,
            {place.tensor: full[place.tensor] for place in placements},
        )

    def _through_loader(self) -> Iterable[Part]:
        """Hugging Face tensors that travel whole, by the module that they belong to."""
        by_module: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, path in self.loader_modules.items():
            if path not in self.modules:
                raise ValueError(f"the engine's model has no {path!r} for {name!r}")
            by_module.setdefault(path, {})[name] = self.plan.family.hf_tensors[name]
        for path, targets in by_module.items():
            yield LoaderPart(
                self.model,
                self.modules[path],
                targets,
                self.dtype,
                self.device,
                self.model_config,
            )

    def _repacked(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """Modules with a packed copy of this embedding or head: itself, and what is tied to it."""
        packs = isinstance(_quant_method(module), UnquantizedEmbeddingMethod)
        if not packs or module.weight.device.type != "cpu":
            return ()
        sharing = (m for m in self.model.modules() if _quant_method(m) is not None)
        return tuple(m for m in sharing if m._parameters.get("weight") is module.weight)

    def _check_all_written(self, written: Mapping[str, Mapping[str, object]]) -> None:
        """Every parameter of the model is in the plan, or belongs to a module that it loads."""
        loaded = set(self.loader_modules.values())
        planned = {target for targets in written.values() for target in targets}
        for name, parameter in self.model.named_parameters():
            if name not in planned and name.rpartition(".")[0] not in loaded:
                raise ValueError(
                    f"the engine's model has {name!r} {tuple(parameter.shape)}, which the plan "
                    "does not write: it would keep the weights that the engine started with"
                )


def loader_modules(plan: ReshardPlan) -> dict[str, str]:
    """Hugging Face tensor that travels whole -> path of the module that its values end in."""
    wanted = frozenset(plan.loader_tensors)
    return {
        tensor.name: plan.map.fused(name).parameter.format(layer=entry.layer).rpartition(".")[0]
        for entry in plan.entries
        for tensor, (name, _) in zip(entry.hf, entry.rule.hf, strict=True)
        if tensor.name in wanted
    }


def _last(target: str) -> str:
    return target.rpartition(".")[2]


def _quant_method(module: nn.Module) -> QuantizeMethodBase | None:
    """The method that owns the layout of a module's weights, if one does."""
    method = vars(module).get("quant_method") or module._modules.get("quant_method")
    return method if isinstance(method, QuantizeMethodBase) else None


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
