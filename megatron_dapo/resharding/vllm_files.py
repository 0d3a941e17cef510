"""Whole models from one safetensors file, through vLLM's own loader.

The way for weights that come without a plan: full Hugging Face tensors, which vLLM cuts and fuses
while it loads them through its layerwise reload.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import layerwise_groups
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from megatron_dapo.resharding.vllm_parts import repack_cpu_experts

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def check_path(path: str, directory: Path) -> Path:
    """`path` resolved, if it is a file inside `directory`.

    Raises:
        ValueError: the path leads elsewhere, also by a link or by "..".
    """
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


class FullTensors:
    """One update of a model by files with full tensors; several files may share it.

    Back in the checkpoint's layout from the start to `finish`.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig) -> None:
        self._model, self._model_config = model, model_config
        self._tied: Mapping[str, nn.Module] = tied_parameters(model)
        initialize_layerwise_reload(model)
        self._missing = {name for name, _ in model.named_parameters()} - set(self._tied)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Tensors of one file."""
        loaded: set[str] = self._model.load_weights(in_layer_order(tensors))  # type: ignore[operator]
        self._missing -= loaded

    def finish(self) -> None:
        """Into the kernels' layout, once every parameter has been loaded.

        Raises:
            RuntimeError: parameters were not in the published files; vLLM itself would keep
                their old values and only log a warning.
        """
        if self._missing:
            raise RuntimeError(
                f"weight update without {len(self._missing)} parameters of the engine's model, "
                f"among them {sorted(self._missing)[:3]}; publish the whole model"
            )
        finalize_layerwise_reload(self._model, self._model_config)
        repack_cpu_experts(self._model)
        repack_cpu_heads(self._tied.values())


def in_layer_order(tensors: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Pairs grouped by layer, so that few layers are half loaded at any time."""
    for names in layerwise_groups(list(tensors)):
        for name in names:
            yield name, tensors[name]
