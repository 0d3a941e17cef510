"""The engine's table agrees with vLLM's own layers, which load numbered weights here."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor

from megatron_dapo.config import model_family
from megatron_dapo.resharding.boxes import Box
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.engine_map import ENGINE_FAMILIES, EngineMap
from megatron_dapo.resharding.name_map import FAMILIES, family_for

vllm_linear = pytest.importorskip("vllm.model_executor.layers.linear", reason="vLLM is missing")

HEADS, KV_HEADS, HEAD, HIDDEN, FFN, VOCAB = 16, 2, 4, 24, 32, 300
EXPERTS = 6


def map_of(model: str = "qwen3", **engine: object) -> EngineMap:
    config = transformers.AutoConfig.for_model(
        model,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
        **({"num_experts": EXPERTS, "moe_intermediate_size": 8} if model == "qwen3_moe" else {}),
    )
    return EngineMap(family_for(config), EngineLayout(**engine))  # type: ignore[arg-type]


@pytest.fixture(
    params=[(1, 0), (2, 1), (4, 2), (8, 5)], ids=lambda place: "rank{1}of{0}".format(*place)
)
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, int]]:
    """(tensor ranks, this one's number), as vLLM's layers see it while they are built."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import vocab_parallel_embedding

    size, rank = request.param
    for module in (vllm_linear, vocab_parallel_embedding):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(
        "vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: rank
    )
    monkeypatch.setattr(
        "vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: size
    )
    with set_current_vllm_config(VllmConfig()):
        yield size, rank


def numbers(*shape: int) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def placed(engine_map: EngineMap, rank: int, tensors: dict[str, Tensor], parameter: str) -> Tensor:
    """The parameter of layer 0, put together by the table."""
    value = torch.full(engine_map.parameters(rank)[parameter], -1.0)
    matrix = value.view(-1, value.shape[-1] if value.dim() > 1 else 1)
    for name, box in engine_map.padding(rank):
        if name == parameter:
            matrix[box.row : box.row + box.rows] = 0
    for put in engine_map.placements(rank):
        if put.parameter == parameter:
            part = put.part
            source = tensors[put.tensor].view(tensors[put.tensor].shape[0], -1)
            matrix[put.row : put.row + part.rows, put.col : put.col + part.cols] = source[
                part.row : part.row + part.rows, part.col : part.col + part.cols
            ]
    return value


def test_every_family_that_can_be_trained_has_a_table() -> None:
    assert sorted(ENGINE_FAMILIES) == sorted(FAMILIES) == sorted(model_family.FAMILIES)


def test_fused_projections_hold_what_vllm_loads(place: tuple[int, int]) -> None:
    size, rank = place
    engine_map, prefix = map_of("qwen2", tensor=size), "model.layers.0.self_attn."
    layer = vllm_linear.QKVParallelLinear(
        HIDDEN, engine_map.family.dimensions["head"], HEADS, KV_HEADS, params_dtype=torch.float32
    )
    tensors = {}
    for part, rows in zip("qkv", ("query", "key", "key"), strict=True):
        length = engine_map.family.dimensions[rows]
        for kind, value in (("weight", numbers(length, HIDDEN)), ("bias", numbers(length))):
            tensors[f"{prefix}{part}_proj.{kind}"] = value
            parameter = layer.get_parameter(kind)
            parameter.weight_loader(parameter, value, part)
    for kind in ("weight", "bias"):
        found = placed(engine_map, rank, tensors, f"{prefix}qkv_proj.{kind}")
        assert torch.equal(found, layer.get_parameter(kind).data), kind


def test_gate_and_up_hold_what_vllm_loads(place: tuple[int, int]) -> None:
    size, rank = place
    layer = vllm_linear.MergedColumnParallelLinear(
        HIDDEN, [FFN] * 2, bias=False, params_dtype=torch.float32
    )
    tensors = {}
    for number, part in enumerate(("gate", "up")):
        tensors[f"model.layers.0.mlp.{part}_proj.weight"] = numbers(FFN, HIDDEN) + 1000 * number
        value = tensors[f"model.layers.0.mlp.{part}_proj.weight"]
        layer.weight.weight_loader(layer.weight, value, number)
    found = placed(map_of(tensor=size), rank, tensors, "model.layers.0.mlp.gate_up_proj.weight")
    assert torch.equal(found, layer.weight.data)


@pytest.mark.parametrize("name", ["self_attn.o_proj.weight", "mlp.down_proj.weight"])
def test_row_parallel_layers_hold_what_vllm_loads(name: str, place: tuple[int, int]) -> None:
    size, rank = place
    engine_map, name = map_of(tensor=size), f"model.layers.0.{name}"
    value = numbers(*engine_map.family.hf_tensors[name])
    layer = vllm_linear.RowParallelLinear(
        value.shape[1], HIDDEN, bias=False, params_dtype=torch.float32
    )
    layer.weight.weight_loader(layer.weight, value)
    assert torch.equal(placed(engine_map, rank, {name: value}, name), layer.weight.data)


def test_embedding_and_head_are_padded_as_by_vllm(place: tuple[int, int]) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    size, rank = place
    layer = VocabParallelEmbedding(VOCAB, HIDDEN, params_dtype=torch.float32)
    value = numbers(VOCAB, HIDDEN)
    parameter = layer.get_parameter("weight")
    parameter.weight_loader(parameter, value)  # type: ignore[attr-defined, operator]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found = placed(map_of(tensor=size), rank, {name: value}, name)
        assert torch.equal(found, parameter.data), name


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_whole_experts_are_dealt_as_by_vllm(ranks: int) -> None:
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    engine_map = map_of("qwen3_moe", tensor=ranks if HEADS % ranks == 0 else 1)
    engine_map.engine = EngineLayout(tensor=ranks, expert_parallel=True)
    for rank in range(ranks):
        count, places, _ = determine_expert_map(ranks, rank, EXPERTS)
        mine = [engine_map.local_expert(expert, rank) for expert in range(EXPERTS)]
        assert len(engine_map.experts(rank)) == count
        if places is not None:
            assert [-1 if local is None else local for local in mine] == places.tolist()


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_fused_experts_hold_what_vllm_loads(expert_parallel: bool) -> None:
    """vLLM's `_load_w13` and `_load_w2` cut gate, up and down of one expert."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    size, rank, ffn, prefix = 2, 1, 8, "model.layers.0.mlp.experts."
    engine_map = map_of("qwen3_moe", tensor=size, expert_parallel=expert_parallel)
    parts = 1 if expert_parallel else size
    grid = SimpleNamespace(tp_size=parts)
    stand_in = SimpleNamespace(
        moe_config=SimpleNamespace(is_act_and_mul=True, moe_parallel_config=grid),
        _get_hidden_dim=RoutedExperts._get_hidden_dim,
        _narrow_expert_data_for_padding=RoutedExperts._narrow_expert_data_for_padding,
    )
    mine = list(engine_map.experts(rank))
    w13 = torch.zeros(len(mine), 2 * ffn // parts, HIDDEN)
    w2 = torch.zeros(len(mine), HIDDEN, ffn // parts)
    tensors = {}
    for expert in range(EXPERTS):
        for number, part in enumerate(("gate", "up", "down")):
            value = numbers(ffn, HIDDEN) if part != "down" else numbers(HIDDEN, ffn)
            tensors[f"{prefix}{expert}.{part}_proj.weight"] = value + 1000 * (3 * expert + number)
    tp_rank = 0 if expert_parallel else rank
    for local, expert in enumerate(mine):
        for name, part in (("w1", "gate"), ("w3", "up")):
            value = tensors[f"{prefix}{expert}.{part}_proj.weight"]
            RoutedExperts._load_w13(stand_in, w13[local], 0, name, value, tp_rank)  # type: ignore[arg-type]
        down = tensors[f"{prefix}{expert}.down_proj.weight"]
        RoutedExperts._load_w2(stand_in, w2[local], 1, down, tp_rank)  # type: ignore[arg-type]
    routed = f"{prefix}routed_experts."
    assert torch.equal(placed(engine_map, rank, tensors, routed + "w13_weight"), w13)
    assert torch.equal(placed(engine_map, rank, tensors, routed + "w2_weight"), w2)


def test_padding_rows_are_named() -> None:
    engine_map = map_of(tensor=4)  # 300 rows, padded to 320: 80 a rank
    assert engine_map.padding(2) == []
    assert engine_map.padding(3) == [
        ("model.embed_tokens.weight", Box(60, 20, 0, HIDDEN)),
        ("lm_head.weight", Box(60, 20, 0, HIDDEN)),
    ]


def test_what_tensor_ranks_cannot_share_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"engine_tensor=3 must divide .*num_attention_heads=16"):
        map_of(tensor=3)
    with pytest.raises(ValueError, match=r"gate_proj\.weight: 8 .*engine_tensor=16"):
        map_of("qwen3_moe", tensor=16)


def test_a_tensor_without_a_place_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**ENGINE_FAMILIES, "qwen3": ENGINE_FAMILIES["llama"]}
    monkeypatch.setattr("megatron_dapo.resharding.engine_map.ENGINE_FAMILIES", table)
    with pytest.raises(
        ValueError, match=r"k_norm\.weight.*no place in the engine table of 'qwen3'"
    ):
        map_of()
