"""How a vLLM model keeps each parameter that a plan writes, found in the live model.

Everything is checked before the first update: names, shapes and dtypes of both sides, and that no
parameter of the model is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from megatron_dapo.resharding.block_grid import SCALE_SUFFIX, scales_shape
from megatron_dapo.resharding.messages import DTYPES, dtype_of
from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.receive import Part
from megatron_dapo.resharding.vllm_parts import LivePart, LoaderPart, RebuiltPart, find_reload

if TYPE_CHECKING:
    from vllm.config import ModelConfig

UNQUANTIZED_METHODS = (UnquantizedLinearMethod, UnquantizedFusedMoEMethod)
FP8_METHODS = (Fp8LinearMethod, Fp8MoEMethod)
"""Whose matrices have a scale for each block, where the plan's shapes are those of vLLM."""
ALWAYS_LIVE = "bias"
"""Parameters of this name stay in place through a layerwise reload."""


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
        self._check_all_written(by_module)
        return parts

    def _direct(self, path: str, targets: dict[str, tuple[int, ...]]) -> list[Part]:
        """Parts of one module: what is live, and the rest."""
        module = self.modules[path]
        live = {t: s for t, s in targets.items() if self._is_live(module, t, s)}
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
            parts.append(self._rebuilt(path, module, names, rest))
        return parts

    def _is_live(self, module: nn.Module, target: str, shape: tuple[int, ...]) -> bool:
        if self.plan.content(target) != "plain":
            return False  # a GPU kernel may keep it in another layout
        method, name = _quant_method(module), _last(target)
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
        in_blocks = any(self.plan.content(target) != "plain" for target in targets)
        known = FP8_METHODS if in_blocks else UNQUANTIZED_METHODS
        if not isinstance(method, known):
            raise ValueError(
                f"{path!r} keeps its weights as {type(method).__name__} does, planned is the "
                f"layout of {' or '.join(each.__name__ for each in known)}; start the engine with "
                "the rollout.engine_quantization of the run"
            )
        for target, name in names.items():
            if in_blocks:
                continue  # its kernel may keep other tensors; what vLLM recorded is checked
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
        self,
        path: str,
        module: nn.Module,
        names: Mapping[str, str],
        targets: Mapping[str, tuple[int, ...]],
    ) -> Part:
        if self.reload is None:
            return self._assembled(path, targets)
        part = RebuiltPart(module, names, targets, self.model_config, self.reload)
        recorded = self.reload.info(module).restore_metadata[0]  # type: ignore[attr-defined]
        for target, name in names.items():
            wanted = targets[target], self._dtype(target)
            found = None
            if name in recorded:
                found = tuple(recorded[name].shape), recorded[name].dtype
            if found != wanted:
                raise ValueError(
                    f"{target!r} is {found or 'not recorded'} in the layout of the checkpoint, "
                    f"planned is {wanted}; the engine serves another model, or in other blocks"
                )
        left = sorted(set(recorded) - set(names.values()))
        if left and isinstance(_quant_method(module), FP8_METHODS):
            raise ValueError(
                f"the engine's model has {path}.{left[0]}, which the plan does not write: it "
                "would keep the weights that the engine started with"
            )
        return part

    def _assembled(self, path: str, targets: Mapping[str, tuple[int, ...]]) -> Part:
        """The same targets for vLLM's loader, as Hugging Face tensors."""
        placements = tuple(
            place
            for place in self.plan.map.placements(self.tensor_rank)
            if place.parameter in targets
        )
        full = self.plan.family.hf_tensors
        scales = {name + SCALE_SUFFIX: scales_shape(s) for name, s in full.items() if len(s) == 2}
        return LoaderPart(
            self.model,
            path,
            targets,
            {target: self._dtype(target) for target in targets},
            self.device,
            self.model_config,
            placements,
            {place.tensor: (full | scales)[place.tensor] for place in placements},
        )

    def _dtype(self, target: str) -> torch.dtype:
        return dtype_of(self.plan.content(target), self.dtype)

    def _repacked(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """Modules with a packed copy of this embedding or head: itself, and what is tied to it."""
        packs = isinstance(_quant_method(module), UnquantizedEmbeddingMethod)
        if not packs or module.weight.device.type != "cpu":
            return ()
        sharing = (m for m in self.model.modules() if _quant_method(m) is not None)
        return tuple(m for m in sharing if m._parameters.get("weight") is module.weight)

    def _check_all_written(self, written: Mapping[str, Mapping[str, object]]) -> None:
        """Every parameter of the model is in the plan; FP8 kernels may have made some more."""
        planned = {target for targets in written.values() for target in targets}
        for name, parameter in self.model.named_parameters():
            path = name.rpartition(".")[0]
            made = path in written and isinstance(_quant_method(self.modules[path]), FP8_METHODS)
            if name not in planned and not made:
                raise ValueError(
                    f"the engine's model has {name!r} {tuple(parameter.shape)}, which the plan "
                    "does not write: it would keep the weights that the engine started with"
                )


def _last(target: str) -> str:
    return target.rpartition(".")[2]


def _quant_method(module: nn.Module) -> QuantizeMethodBase | None:
    """The method that owns the layout of a module's weights, if one does."""
    method = vars(module).get("quant_method") or module._modules.get("quant_method")
    return method if isinstance(method, QuantizeMethodBase) else None
