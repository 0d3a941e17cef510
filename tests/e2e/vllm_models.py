"""vLLM's own models in one process for each tensor rank: no server, no scheduler.

What a model holds between vLLM's loader and its kernels is the reference that updates are compared
with: a load from a Hugging Face folder, by vLLM itself.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_dapo.resharding.digest import as_hex, parameter_digest
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.files import version_folder, write_messages
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import ReshardPlan, build_plan
from megatron_dapo.resharding.train_map import TrainLayout
from tests.unit.resharding.in_process import outboxes_of

VLLM_ENVIRONMENT = {
    "VLLM_PLUGINS": "megatron_dapo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm_config(
    folder: Path, *, tensor: int, rank: int, dtype: str, store: str, **others: object
) -> Iterator[object]:
    """vLLM's configuration for a folder, set as the current one, with its process groups."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,  # type: ignore[arg-type]
        enforce_eager=True,
        max_model_len=128,
        tensor_parallel_size=tensor,
        weight_transfer_config={"backend": "megatron_dapo"},  # type: ignore[arg-type]
        **{"load_format": "safetensors", **others},  # type: ignore[arg-type]
    )
    config = arguments.create_engine_config()
    config.parallel_config.rank = rank
    os.environ["VLLM_DIST_IDENT"] = hashlib.sha256(store.encode()).hexdigest()[:12]
    with set_current_vllm_config(config):
        init_distributed_environment(tensor, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(tensor)
        try:
            yield config
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def load_model(config: object, folder: Path, *, kernels: bool) -> nn.Module:
    """A folder as vLLM loads it; `kernels`: and as its kernels keep it."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )

    model_config = config.model_config  # type: ignore[attr-defined]
    config.compilation_config.static_forward_context.clear()  # type: ignore[attr-defined]
    default = torch.get_default_dtype()
    torch.set_default_dtype(model_config.dtype)
    try:
        model = initialize_model(config)  # type: ignore[arg-type]
        loader = get_model_loader(config.load_config)  # type: ignore[attr-defined]
        model_config.model = str(folder)
        loader.load_weights(model, model_config)
        if kernels:
            process_weights_after_loading(model, model_config, torch.device("cpu"))
    finally:
        torch.set_default_dtype(default)
    return model


def digests_of(model: nn.Module, plan: ReshardPlan) -> dict[str, str]:
    """Of a model in the checkpoint's layout."""
    return {
        name: as_hex(int(parameter_digest(parameter.detach(), word_bytes=plan.word_bytes(name))))
        for name, parameter in model.named_parameters()
    }


def plan_of(
    folder: Path, train: TrainLayout, *, tensor: int, dtype: str, bucket_bytes: int
) -> ReshardPlan:
    """The plan for a folder's model."""
    import transformers

    family = family_for(transformers.AutoConfig.from_pretrained(folder))
    engine = EngineLayout(tensor=tensor, dtype=dtype)  # type: ignore[arg-type]
    return build_plan(train, engine, family, bucket_bytes=bucket_bytes)


def init_info(plan: ReshardPlan, directory: Path) -> dict[str, object]:
    """What the trainer tells an engine once."""
    return {
        "transport": "files",
        "directory": str(directory),
        "train_layout": asdict(plan.train),
        "engine_layout": asdict(plan.engine),
        "bucket_bytes": plan.bucket_bytes,
        "fingerprint": plan.fingerprint,
        "replica": 0,
        "timeout_seconds": 60.0,
    }


def publish_messages(
    plan: ReshardPlan, tensors: dict[str, Tensor], directory: Path, version: int
) -> tuple[dict[str, object], list[dict[str, str]]]:
    """Write a version as the trainer ranks do: payload, and digests for each tensor rank."""
    folder = version_folder(directory, version)
    folder.mkdir()
    sums: list[Counter[str]] = [Counter() for _ in range(plan.engine.tensor)]
    for outbox in outboxes_of(plan, tensors):
        write_messages(folder, version, outbox)
        for receiver, total in enumerate(sums):
            total.update(outbox.partial_digests(receiver))
    digests = [{name: as_hex(value) for name, value in total.items()} for total in sums]
    payload: dict[str, object] = {
        "policy_version": version,
        "folder": str(folder),
        "generations": [0],
    }
    return payload, digests


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The folder's Hugging Face tensors, fp32."""
    stored = load_file(folder / "model.safetensors")
    return {name: value.float() for name, value in stored.items()}


def kernel_state(model: nn.Module) -> dict[str, Tensor]:
    """What kernels hold: all parameters, and what packed layers answer to a fixed input."""
    found = {name: value.detach().clone() for name, value in model.named_parameters()}
    for path, module in model.named_modules(remove_duplicate=False):
        packed = vars(module).get("cpu_linear")
        if packed is not None:
            sizes = vars(module)
            width = sizes.get("input_size_per_partition") or sizes.get("input_size")
            width = width or module.embedding_dim
            inputs = torch.linspace(-1, 1, 3 * width, dtype=torch.float32).view(3, width)
            bias = module._parameters.get("bias")
            dtype = model.model.norm.weight.dtype
            found[f"{path}: output"] = packed(inputs.to(dtype), module._parameters["weight"], bias)
    return found
