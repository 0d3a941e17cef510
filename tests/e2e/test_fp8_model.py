"""vLLM's own models in FP8 take planned updates: what quantised checkpoint tensors would give.

Models, loaders and reload are vLLM's, for one tensor rank; the kernels need a GPU, so stand-ins
keep the weights as they were loaded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from megatron_dapo.resharding.engine_map import EngineLayout
from megatron_dapo.resharding.name_map import Family, family_for
from megatron_dapo.resharding.plan import ReshardPlan, build_plan
from megatron_dapo.resharding.quantize import E4M3, quantized
from megatron_dapo.resharding.train_map import TrainLayout
from megatron_dapo.rollout.server_options import server_command, server_options
from tests.e2e.vllm_models import (
    VLLM_ENVIRONMENT,
    init_info,
    load_model,
    publish_messages,
    tensors_of,
    vllm_config,
)
from tests.tiny_models import save_tiny_model
from tests.unit.config.runs import make_config

pytest.importorskip("vllm")

SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128, "vocab_size": 512}
CASES = {"qwen3": {}, "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 4}}
TRAIN = TrainLayout(tensor=2, pipeline=2, data=2, padded_vocab_size=512)


def _overrides(folder: Path) -> dict[str, object]:
    """As the server is started."""
    config = make_config(rollout={"engine_quantization": "fp8", "engine_dtype": "bfloat16"})
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
    command = server_command(server_options(config, 0, device="cuda"), Path("/s"))
    return json.loads(command[command.index("--hf-overrides") + 1])


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Kernels that take weights as they are."""
    from vllm.model_executor.layers.quantization import fp8

    kernel = SimpleNamespace(process_weights_after_loading=lambda layer: None)

    def process(method: fp8.Fp8MoEMethod, layer: nn.Module) -> None:
        method.moe_kernel = SimpleNamespace(fused_experts=kernel)  # type: ignore[assignment]

    with (
        patch.object(fp8, "init_fp8_linear_kernel", lambda **_: kernel),
        patch.object(fp8, "select_fp8_moe_backend", lambda **_: (None, None)),
        patch.object(fp8.Fp8MoEMethod, "process_weights_after_loading", process),
    ):
        yield


def _check(folder: Path, store: str) -> None:
    """Two updates by the plan of one model, as a worker takes them."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from megatron_dapo.resharding.vllm_plugin import register

    register()
    first, second = tensors_of(folder / "a"), tensors_of(folder / "b")
    fp8 = {"quantization": "fp8", "hf_overrides": _overrides(folder / "a"), "load_format": "dummy"}
    with vllm_config(
        folder / "a", tensor=1, rank=0, dtype="bfloat16", store=store, **fp8
    ) as config:
        model = load_model(config, folder / "a", kernels=True)
        family = family_for(config.model_config.hf_config)
        plan = build_plan(TRAIN, EngineLayout(quantization="fp8"), family, bucket_bytes=200_000)
        weights = folder / "weights"
        weights.mkdir()
        engine = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, config, torch.device("cpu"), model
        )
        engine.init_transfer_engine(engine.parse_init_info(init_info(plan, weights)))
        for version, tensors in enumerate((first, second), start=1):
            payload, digests = publish_messages(plan, tensors, weights, version)
            engine.start_weight_update()
            engine.update_weights(payload)
            engine.finish_weight_update()
            assert engine.planned.digests() == digests[0]
            _compare(model, family, plan, tensors)
        report = engine.planned.report()
        assert report["loader"] == len(plan.loader_tensors) > 0


def _compare(
    model: nn.Module, family: Family, plan: ReshardPlan, tensors: dict[str, Tensor]
) -> None:
    """Every parameter against the tensors, put together by hand."""
    rounded = {name: value.bfloat16() for name, value in tensors.items()}
    names = [name for name in plan.loader_tensors if rounded[name].dim() == 2]
    exact = rounded | dict(quantized((name, rounded[name]) for name in names))
    seen = set()
    for name, parameter in model.named_parameters():
        parts = _parts(name, family)
        if "experts" in name:
            wanted = torch.stack([torch.cat([exact[p] for p in expert]) for expert in parts])
        else:
            wanted = torch.cat([exact[part] for part in parts])
        seen |= {p for part in parts for p in ([part] if isinstance(part, str) else part)}
        assert parameter.dtype == wanted.dtype, name
        if name.endswith("mlp.gate.weight"):  # packed on CPU; its digest has been compared
            continue
        assert torch.equal(parameter.data.view(torch.uint8), wanted.view(torch.uint8)), name
    assert seen == exact.keys()
    assert all(exact[name].dtype == E4M3 for name in names)


def _parts(name: str, family: Family) -> list[str] | list[list[str]]:
    """Tensors that are stacked in a parameter; of experts, those of each."""
    module, _, kind = name.rpartition(".")
    if "experts" in name:
        stem = module.removesuffix(".routed_experts")
        fused, _, rest = kind.partition("_")
        which = ("gate", "up") if fused == "w13" else ("down",)
        return [
            [f"{stem}.{expert}.{part}_proj.{rest}" for part in which]
            for expert in range(family.num_experts)
        ]
    stem, _, last = module.rpartition(".")
    if last == "qkv_proj":
        return [f"{stem}.{part}_proj.{kind}" for part in "qkv"]
    if last == "gate_up_proj":
        return [f"{stem}.{part}_proj.{kind}" for part in ("gate", "up")]
    return [name]


def _in_process(_: int, root: str) -> None:
    torch.set_num_threads(1)
    for family in CASES:
        with tempfile.TemporaryDirectory() as folder, _stand_ins():
            _check(Path(root) / family, f"{folder}/store")


def test_fp8_models_hold_the_quantised_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VLLM_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for family, sizes in CASES.items():
        for seed, name in enumerate(("a", "b")):
            save_tiny_model(tmp_path / family / name, family, layers=2, seed=seed, **SIZES | sizes)
    mp.spawn(_in_process, (str(tmp_path),), nprocs=1)
