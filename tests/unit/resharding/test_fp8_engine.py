"""What a plan writes into vLLM's fused FP8 parameters is what vLLM loads from an FP8 checkpoint.

vLLM's own layers, parameters, weight loaders and layerwise reload; only its kernels, which need a
GPU, are stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron_dapo.resharding.block_grid import BLOCK, SCALE_SUFFIX
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.engine_map import EngineMap
from megatron_dapo.resharding.messages import dtype_of
from megatron_dapo.resharding.plan import TrainLayout
from megatron_dapo.resharding.quantize import E4M3, dequantize_blocks, quantized
from megatron_dapo.rollout.server_options import FP8_BLOCKS
from tests.unit.resharding.fp8_layouts import bits, expected, telling
from tests.unit.resharding.layouts import Case

vllm_linear = pytest.importorskip("vllm.model_executor.layers.linear", reason="vLLM is missing")

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.quantization import fp8  # noqa: E402
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading  # noqa: E402

from megatron_dapo.resharding.vllm_parts import (  # noqa: E402
    LoaderPart,
    RebuiltPart,
    find_reload,
)

HEADS, HEAD, FFN, EXPERTS = 4, 128, 512, 3
HIDDEN = HEADS * HEAD
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


def case_of(place: tuple[int, int], family: str, kv_heads: int = 2) -> Case:
    """One layer, for engines of so many ranks."""
    sizes: dict[str, object] = {
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "vocab_size": 64,
    }
    if family == "qwen3_moe":
        sizes |= {"head_dim": HEAD, "num_experts": EXPERTS, "moe_intermediate_size": 256}
        sizes["decoder_sparse_step"] = 1
    return Case(
        transformers.AutoConfig.for_model(family, **sizes),
        TrainLayout(padded_vocab_size=64),
        EngineLayout(tensor=place[0], quantization="fp8"),
        10**6,
    )


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


@dataclass(frozen=True)
class Layer:
    """One fused layer of vLLM and the Hugging Face tensors in it."""

    make: Callable[[], nn.Module]
    prefix: str
    name: str
    parts: dict[str, object]

    def model(self) -> Model:
        model = Model(self.make(), self.name, self.parts)
        record_metadata_for_reloading(model)
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
        return model


def part_for(
    way: str, model: Model, layer: Layer, case: Case, rank: int
) -> RebuiltPart | LoaderPart:
    """The layer's parameters but for its bias, which is live."""
    layout = EngineMap(case.family, case.engine)
    start = layer.prefix + layer.name
    contents = {
        name.removeprefix(layer.prefix): (content, shape)
        for name, content, shape in layout.contents(rank)
        if name.startswith(start + ".") and not name.endswith("bias")
    }
    targets = {name: shape for name, (_, shape) in contents.items()}
    config = cast(Any, SimpleNamespace(dtype=torch.bfloat16, quantization="fp8"))
    if way == "rebuilt":
        reload = find_reload()
        assert reload is not None
        names = {name: name.rpartition(".")[2] for name in targets}
        module = model.get_submodule(layer.name)
        return RebuiltPart(module, names, targets, config, reload)
    placements = tuple(
        replace(
            found,
            tensor=found.tensor.removeprefix(layer.prefix),
            parameter=found.parameter.removeprefix(layer.prefix),
        )
        for found in layout.placements(rank)
        if found.parameter.removeprefix(layer.prefix) in targets
    )
    checkpoint = quantized_tensors(case, layer)
    return LoaderPart(
        model,
        layer.name,
        targets,
        {name: dtype_of(content, torch.bfloat16) for name, (content, _) in contents.items()},
        torch.device("cpu"),
        config,
        placements,
        {found.tensor: tuple(checkpoint[found.tensor].shape) for found in placements},
    )


def quantized_tensors(case: Case, layer: Layer) -> dict[str, Tensor]:
    """As an FP8 checkpoint holds the layer: values and scales; biases as they are."""
    found: dict[str, Tensor] = {}
    for name, tensor in telling(case.family).items():
        short = name.removeprefix(layer.prefix)
        if short == name or short.rpartition(".")[0] not in layer.parts:
            continue
        rounded = tensor.bfloat16()
        found |= dict(quantized([(short, rounded)])) if tensor.dim() == 2 else {short: rounded}
    return found


def check(case: Case, place: tuple[int, int], layer: Layer) -> None:
    """Both ways of writing leave what vLLM's own loader leaves of an FP8 checkpoint."""
    reference = layer.model()
    reference.load_weights(quantized_tensors(case, layer).items())
    whole = expected(case, telling(case.family), place[1])
    wanted = {name: whole[layer.prefix + name] for name, _ in reference.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert torch.equal(bits(parameter.data), bits(wanted[name])), name
    for way in ("rebuilt", "loader"):
        model = layer.model()
        part = part_for(way, model, layer, case, place[1])
        for _ in range(2):  # an update like any other
            for name, target in part.open().items():
                target.copy_(wanted[name].view(target.dtype))
            part.close()
        found = dict(model.named_parameters())
        for name in part.targets:
            assert torch.equal(bits(found[name].data), bits(wanted[name])), (way, name)
        weight = found[f"{layer.name}.weight"].data
        assert weight.dtype == E4M3
        back = dequantize_blocks(weight, found[f"{layer.name}.weight{SCALE_SUFFIX}"].data)
        assert back.abs().max() > 10 * back.abs().median() > 0


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_qkv(place: tuple[int, int], kv_heads: int) -> None:
    def make() -> nn.Module:
        return vllm_linear.QKVParallelLinear(
            HIDDEN, HEAD, HEADS, kv_heads, params_dtype=torch.bfloat16, quant_config=fp8_config()
        )

    parts: dict[str, object] = {f"{part}_proj": part for part in "qkv"}
    layer = Layer(make, "model.layers.0.self_attn.", "qkv_proj", parts)
    check(case_of(place, "qwen2", kv_heads), place, layer)


def test_gate_and_up(place: tuple[int, int]) -> None:
    def make() -> nn.Module:
        return vllm_linear.MergedColumnParallelLinear(
            HIDDEN, [FFN] * 2, bias=False, params_dtype=torch.bfloat16, quant_config=fp8_config()
        )

    parts: dict[str, object] = {"gate_proj": 0, "up_proj": 1}
    layer = Layer(make, "model.layers.0.mlp.", "gate_up_proj", parts)
    check(case_of(place, "qwen2"), place, layer)


def test_row_parallel_layers(place: tuple[int, int]) -> None:
    def make() -> nn.Module:
        return vllm_linear.RowParallelLinear(
            FFN, HIDDEN, bias=False, params_dtype=torch.bfloat16, quant_config=fp8_config()
        )

    layer = Layer(make, "model.layers.0.mlp.", "down_proj", {"down_proj": None})
    check(case_of(place, "qwen2"), place, layer)


def test_why_parts_that_blocks_do_not_fill_are_refused(place: tuple[int, int]) -> None:
    """vLLM refuses some itself; rows of fused layers it takes, with less scales than blocks."""
    options = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": fp8_config()}
    uneven = 192 * place[0]
    fused = vllm_linear.MergedColumnParallelLinear(HIDDEN, [uneven] * 2, **options)
    assert fused.get_parameter("weight" + SCALE_SUFFIX).shape[0] == 3 < 2 * 2
    if place[0] > 1:
        with pytest.raises(ValueError, match="not divisible by weight quantization block_k"):
            vllm_linear.RowParallelLinear(uneven, HIDDEN, **options)
    with pytest.raises(ValueError, match="not divisible by weight quantization block_n"):
        expert_loader(place).quant_method.create_weights(
            nn.Module(), EXPERTS, HIDDEN, 192, torch.bfloat16
        )


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
    case = case_of(place, "qwen3_moe")
    ffn = case.family.dimensions["expert_ffn"]
    holder, loader = nn.Module(), expert_loader(place)
    loader.quant_method.create_weights(
        holder, EXPERTS, HIDDEN, ffn // place[0], torch.bfloat16, weight_loader=loader.weight_loader
    )
    names = {"gate": ("w13", "w1"), "up": ("w13", "w3"), "down": ("w2", "w2")}
    tensors = telling(case.family)
    layer = Layer(
        nn.Module,
        "model.layers.0.mlp.experts.",
        "",
        dict.fromkeys(f"{expert}.{part}_proj" for expert in range(EXPERTS) for part in names),
    )
    for name, tensor in quantized_tensors(case, layer).items():
        expert, part, last = name.split(".")
        fused, shard = names[part.removesuffix("_proj")]
        kind = f"{fused}_{last}"
        parameter = holder.get_parameter(kind)
        assert loader.weight_loader(parameter, tensor, kind, shard, int(expert), True)
    wanted = expected(case, tensors, place[1])
    planned = EngineMap(case.family, case.engine).parameters(place[1])
    found = dict(holder.named_parameters())
    assert len(found) == 4
    for name, parameter in found.items():
        full = f"model.layers.0.mlp.experts.routed_experts.{name}"
        assert tuple(parameter.shape) == planned[full]
        assert torch.equal(
            bits(parameter.data), bits(wanted[full]).view(bits(parameter.data).shape)
        )


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
