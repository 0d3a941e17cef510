"""vLLM's own models in FP8 take planned updates: what vLLM loads from an FP8 checkpoint.

Models, loaders and reload are vLLM's, for one tensor rank and for two; the kernels need a GPU, so
stand-ins keep the weights as they were loaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.messages import dtype_of
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import ReshardPlan, build_plan
from megatron_dapo.resharding.quantize import quantized
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

SIZES = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 128, "vocab_size": 512}
MOE = {"moe_intermediate_size": 768, "num_experts": 4}
CASES: dict[str, dict[str, int]] = {"qwen2": {"hidden_size": 512}, "qwen3": {}, "qwen3_moe": MOE}
TRAIN = {
    "qwen2": TrainLayout(tensor=2, data=2, padded_vocab_size=512),
    "qwen3": TrainLayout(tensor=2, pipeline=2, data=2, padded_vocab_size=512),
    # A rank's 192 columns or rows of an expert are a block and a half.
    "qwen3_moe": TrainLayout(
        tensor=2, data=4, expert=2, expert_tensor=4, pipeline=2, padded_vocab_size=512
    ),
}


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


def _check(family: str, folder: Path, store: str, tensor: int, rank: int) -> None:
    """Two updates by the plan of one model, as a worker takes them."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from megatron_dapo.resharding.vllm_plugin import register

    register()
    fp8 = {"quantization": "fp8", "hf_overrides": _overrides(folder / "a"), "load_format": "dummy"}
    with vllm_config(
        folder / "a", tensor=tensor, rank=rank, dtype="bfloat16", store=store, **fp8
    ) as config:
        reference = load_model(config, folder / "a", kernels=False)
        model = load_model(config, folder / "a", kernels=True)
        plan = build_plan(
            TRAIN[family],
            EngineLayout(tensor=tensor, quantization="fp8"),
            family_for(config.model_config.hf_config),
            bucket_bytes=200_000,
        )
        assert bool(plan.shared_blocks) == (family == "qwen3_moe")
        weights = folder / f"weights_{tensor}_{rank}"  # each rank publishes for itself
        weights.mkdir()
        engine = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, config, torch.device("cpu"), model
        )
        engine.init_transfer_engine(engine.parse_init_info(init_info(plan, weights)))
        for version, name in enumerate(("a", "b"), start=1):
            tensors = tensors_of(folder / name)
            payload, digests = publish_messages(plan, tensors, weights, version)
            engine.start_weight_update()
            engine.update_weights(payload)
            engine.finish_weight_update()
            assert engine.planned.digests() == digests[rank]
            reference.load_weights(_checkpoint(plan, tensors))
            _compare(model, reference, plan, rank)
        report = engine.planned.report()
        contents = Counter(plan.content(name) for name in plan.parameters(rank))
        assert report["rebuilt"] >= contents["values"] + contents["scales"] > 0
        assert not report["loader"]
        received, planned = report["bytes_received"], plan.bytes_by_receiver()[rank]
        assert planned <= received <= 1.001 * planned
        assert plan.bytes_moved == plan.lower_bound


def _checkpoint(plan: ReshardPlan, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an FP8 checkpoint, each matrix quantised whole."""
    in_blocks = set(plan.map.quantized_tensors())
    for name, tensor in tensors.items():
        if name in in_blocks:
            yield from quantized([(name, tensor.bfloat16())])
        else:
            yield name, tensor.bfloat16()


def _compare(model: nn.Module, reference: nn.Module, plan: ReshardPlan, rank: int) -> None:
    """Every parameter, byte for byte."""
    wanted = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    planned = plan.parameters(rank).keys()
    assert found.keys() == planned, found.keys() ^ planned
    # Scales of an FP8 KV cache, which there is not; vLLM drops them after a load.
    others = wanted.keys() - planned
    assert wanted.keys() >= planned and all(".attn." in name for name in others), others
    for name, parameter in found.items():
        assert parameter.dtype == dtype_of(plan.content(name), torch.bfloat16), name
        if name.endswith("mlp.gate.weight"):  # packed on CPU; its digest has been compared
            continue
        mine, other = (tensor.data.view(torch.uint8) for tensor in (parameter, wanted[name]))
        assert torch.equal(mine, other), name


def _in_process(rank: int, root: str, tensor: int) -> None:
    torch.set_num_threads(1)
    for family in CASES:
        folder = Path(root) / family
        with _stand_ins():
            _check(family, folder, f"{folder}/store", tensor, rank)


@pytest.mark.parametrize("tensor", [1, 2])
def test_fp8_models_hold_what_an_fp8_checkpoint_holds(
    tensor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VLLM_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for family, sizes in CASES.items():
        for seed, name in enumerate(("a", "b")):
            save_tiny_model(tmp_path / family / name, family, layers=2, seed=seed, **SIZES | sizes)
    mp.spawn(_in_process, (str(tmp_path), tensor), nprocs=tensor)
