"""Full tensors become values and scales in the right rows of vLLM's fused FP8 parameters.

vLLM's own layers, parameters, weight loaders and layerwise reload; only its kernels, which need a
GPU, are stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from megatron_dapo.resharding.quantize import (
    BLOCK,
    E4M3,
    SCALE_SUFFIX,
    dequantize_blocks,
    quantize_blocks,
    quantized,
)
from megatron_dapo.rollout.server_options import FP8_BLOCKS

vllm_linear = pytest.importorskip("vllm.model_executor.layers.linear", reason="vLLM is missing")

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.quantization import fp8  # noqa: E402
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading  # noqa: E402

from megatron_dapo.resharding.vllm_parts import LoaderPart  # noqa: E402

HIDDEN, HEADS, HEAD = 256, 4, 128
GRID = "get_tensor_model_parallel_world_size"
RANK = "get_tensor_model_parallel_rank"


class Kernel:
    """In place of a GPU kernel: takes the weights as they are."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing."""


@pytest.fixture(params=[(1, 0), (2, 0), (2, 1)], ids=lambda at: "rank{1}of{0}".format(*at))
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, int]]:
    """(tensor ranks, this one's number), as vLLM's layers see it while they are built."""
    from vllm.config import VllmConfig, set_current_vllm_config

    size, rank = request.param
    for module in ("layers.linear", "parameter"):
        monkeypatch.setattr(f"vllm.model_executor.{module}.{GRID}", lambda: size)
        monkeypatch.setattr(f"vllm.model_executor.{module}.{RANK}", lambda: rank)
    monkeypatch.setattr(f"vllm.distributed.{GRID}", lambda: size)
    monkeypatch.setattr(fp8, GRID, lambda: size)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: Kernel())
    config = VllmConfig()
    config.model_config = cast(Any, SimpleNamespace(dtype=torch.bfloat16, quantization="fp8"))
    with set_current_vllm_config(config):
        yield size, rank


def fp8_config() -> fp8.Fp8Config:
    """As the engine makes it of the override that it is started with."""
    blocks = dict(FP8_BLOCKS) | {"modules_to_not_convert": ["model.layers.0.mlp.gate"]}
    return fp8.Fp8Config.from_config(blocks)


def telling(*shape: int, seed: int) -> Tensor:
    """Blocks of very different size, so that a scale in a wrong place is seen."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    rows, cols = (torch.arange(size) // BLOCK for size in shape)
    return (values * 2.0 ** (rows[:, None] * 3 + cols[None] - seed)).bfloat16()


class Model(nn.Module):
    """One fused layer, and a `load_weights` in vLLM's manner."""

    def __init__(self, layer: nn.Module, name: str, parts: dict[str, object]) -> None:
        super().__init__()
        setattr(self, name, layer)
        self.name, self.parts = name, parts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        filled = set()
        for name, tensor in weights:
            part, _, kind = name.rpartition(".")
            filled.add(f"{self.name}.{kind}")
            parameter = dict(self.named_parameters())[f"{self.name}.{kind}"]
            shard = self.parts[part]
            if shard is None:
                parameter.weight_loader(parameter, tensor)  # type: ignore[attr-defined]
            else:
                parameter.weight_loader(parameter, tensor, shard)  # type: ignore[attr-defined]
        return filled


def loaded(model: Model, tensors: dict[str, Tensor]) -> nn.Module:
    """The layer after its full tensors have gone through a `LoaderPart`."""
    layer = cast(nn.Module, getattr(model, model.name))
    record_metadata_for_reloading(model)
    for parameter in layer.parameters():
        parameter.data.fill_(1.0)
    part = LoaderPart(
        model,
        model.name,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        torch.bfloat16,
        torch.device("cpu"),
        cast(Any, SimpleNamespace(dtype=torch.bfloat16, quantization="fp8")),
        in_fp8=True,
    )
    for _ in range(2):  # an update like any other
        for name, target in part.open().items():
            target.copy_(tensors[name])
        part.close()
    return layer


def check(layer: nn.Module, wanted: Tensor) -> None:
    """Values and scales together are the rank's part of the tensors, rounded once."""
    weight, scales = layer.get_parameter("weight"), layer.get_parameter("weight_scale_inv")
    assert (weight.dtype, scales.dtype) == (E4M3, torch.float32)
    assert weight.shape == wanted.shape
    values, exact = quantize_blocks(wanted)
    assert torch.equal(weight.data.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scales.data, exact)
    error = (dequantize_blocks(weight.data, scales.data) - wanted.float()).abs()
    assert (error <= wanted.float().abs() / 16 + exact.max() * 2**-10).all()


def cut(tensor: Tensor, place: tuple[int, int], dim: int) -> Tensor:
    return tensor.chunk(place[0], dim)[place[1]]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_qkv(place: tuple[int, int], kv_heads: int) -> None:
    layer = vllm_linear.QKVParallelLinear(
        HIDDEN, HEAD, HEADS, kv_heads, params_dtype=torch.bfloat16, quant_config=fp8_config()
    )
    tensors = {
        f"{part}_proj.weight": telling(heads * HEAD, HIDDEN, seed=seed)
        for seed, (part, heads) in enumerate({"q": HEADS, "k": kv_heads, "v": kv_heads}.items())
    }
    tensors |= {
        name.replace("weight", "bias"): tensor[:, 0].clone() for name, tensor in tensors.items()
    }
    model = Model(layer, "qkv_proj", {f"{part}_proj": part for part in "qkv"})
    found = loaded(model, tensors)

    def mine(kind: str) -> Tensor:
        whole = {part: tensors[f"{part}_proj.{kind}"] for part in "qkv"}
        keys = [whole[part] if kv_heads < place[0] else cut(whole[part], place, 0) for part in "kv"]
        return torch.cat([cut(whole["q"], place, 0), *keys])

    check(found, mine("weight"))
    assert torch.equal(found.get_parameter("bias").data, mine("bias"))


def test_gate_and_up(place: tuple[int, int]) -> None:
    layer = vllm_linear.MergedColumnParallelLinear(
        HIDDEN, [512] * 2, bias=False, params_dtype=torch.bfloat16, quant_config=fp8_config()
    )
    tensors = {
        f"{part}_proj.weight": telling(512, HIDDEN, seed=seed)
        for seed, part in enumerate(("gate", "up"))
    }
    model = Model(layer, "gate_up_proj", {"gate_proj": 0, "up_proj": 1})
    check(loaded(model, tensors), torch.cat([cut(t, place, 0) for t in tensors.values()]))


def test_row_parallel_layers(place: tuple[int, int]) -> None:
    layer = vllm_linear.RowParallelLinear(
        512, HIDDEN, bias=False, params_dtype=torch.bfloat16, quant_config=fp8_config()
    )
    tensors = {"down_proj.weight": telling(HIDDEN, 512, seed=1)}
    model = Model(layer, "down_proj", {"down_proj": None})
    check(loaded(model, tensors), cut(tensors["down_proj.weight"], place, 1))


def test_routers_stay_as_they_are(place: tuple[int, int]) -> None:
    config = fp8_config()
    for prefix, method in (
        ("model.layers.0.mlp.gate", vllm_linear.UnquantizedLinearMethod),
        ("model.layers.0.mlp.down_proj", fp8.Fp8LinearMethod),
        ("model.layers.10.mlp.gate", fp8.Fp8LinearMethod),  # not named: whole names count
    ):
        layer = vllm_linear.ReplicatedLinear(
            HIDDEN, 128, bias=False, quant_config=config, prefix=prefix
        )
        assert type(layer.quant_method) is method, prefix


def test_experts(place: tuple[int, int]) -> None:
    """w13 and w2 with their scales, as `Fp8MoEMethod` makes them and `RoutedExperts` loads them."""
    experts, ffn = 3, 256
    holder, loader = nn.Module(), expert_loader(place)
    loader.quant_method.create_weights(
        holder, experts, HIDDEN, ffn // place[0], torch.bfloat16, weight_loader=loader.weight_loader
    )
    names = {"gate": ("w13", "w1"), "up": ("w13", "w3"), "down": ("w2", "w2")}
    tensors = {
        f"{expert}.{part}": telling(*((HIDDEN, ffn) if part == "down" else (ffn, HIDDEN)), seed=s)
        for expert in range(experts)
        for s, part in enumerate(names, start=3 * expert)
    }
    for name, tensor in quantized(tensors.items()):
        expert, part = name.removesuffix(SCALE_SUFFIX).split(".")
        fused, shard = names[part]
        kind = f"{fused}_weight" + (SCALE_SUFFIX if name.endswith(SCALE_SUFFIX) else "")
        parameter = holder.get_parameter(kind)
        assert loader.weight_loader(parameter, tensor, kind, shard, int(expert), True)
    for expert in range(experts):
        gate_up = [cut(tensors[f"{expert}.{part}"], place, 0) for part in ("gate", "up")]
        for fused, wanted in (
            ("w13_weight", torch.cat(gate_up)),
            ("w2_weight", cut(tensors[f"{expert}.down"], place, 1)),
        ):
            values, scales = quantize_blocks(wanted)
            found = holder.get_parameter(fused)[expert]
            assert found.dtype == E4M3
            assert torch.equal(found.view(torch.uint8), values.view(torch.uint8)), fused
            assert torch.equal(holder.get_parameter(fused + SCALE_SUFFIX)[expert], scales), fused


def expert_loader(place: tuple[int, int]) -> Any:
    """The weight loaders of `RoutedExperts` on something that needs no kernel."""
    method = object.__new__(fp8.Fp8MoEMethod)
    blocks = [BLOCK, BLOCK]
    vars(method).update(
        quant_config=fp8_config(),
        weight_block_size=blocks,
        block_quant=True,
        weight_scale_name="weight_scale_inv",
        weight_scale_refine=None,
        moe_block_shape=blocks,
        moe=SimpleNamespace(w13_num_shards=2, has_bias=False),
    )
    borrowed = {name: item for name, item in vars(RoutedExperts).items() if "load" in name}
    borrowed |= {
        name: vars(RoutedExperts)[name]
        for name in ("_get_hidden_dim", "_narrow_expert_data_for_padding")
    }
    loader = type("Loader", (), borrowed)()
    loader.quant_config, loader.quant_method = method.quant_config, method
    loader._fused_shared_expert_quantizer = None
    loader._map_global_expert_id_to_local_expert_id = lambda expert: expert
    loader.moe_config = SimpleNamespace(
        is_act_and_mul=True,
        tp_size=place[0],
        tp_rank=place[1],
        tp_shard_with_padding=False,
        moe_parallel_config=SimpleNamespace(tp_size=place[0]),
    )
    return loader
