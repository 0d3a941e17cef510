"""The name table, read both ways, and the handed conversion cases."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.config import model_family
from megatron_dapo.policy.model import padded_vocab_size
from megatron_dapo.resharding.cuts import GATE_UP, QKV, fuse, shard_bounds, unfuse
from megatron_dapo.resharding.layout import experts_per_rank, global_expert, stage_layers
from megatron_dapo.resharding.load import check_names
from megatron_dapo.resharding.name_map import FAMILIES, family_for
from tests.tiny_models import FAMILIES as TINY_FAMILIES
from tests.tiny_models import tiny_model
from tests.unit.handed import Case, handed_cases


def config_of(family: str, **options: object) -> transformers.PretrainedConfig:
    return tiny_model(family, hidden_size=64, intermediate_size=96, **options).config  # type: ignore[arg-type]


def test_every_family_that_can_be_trained_has_a_table() -> None:
    assert sorted(FAMILIES) == sorted(model_family.FAMILIES)


def labelled_rows(parts: list[list[str]], shards: int, blocks: int) -> list[list[str]]:
    """What each rank holds when the Hugging Face rows carry these labels."""
    labels = [label for part in parts for label in part]
    numbers = {label: number for number, label in enumerate(labels)}
    rows = []
    for index in range(shards):
        pieces = [
            torch.tensor([numbers[label] for label in part[shard_bounds(len(part), shards, index)]])
            for part in parts
        ]
        rows.append([labels[number] for number in fuse(pieces, blocks).tolist()])
    return rows


@pytest.mark.parametrize("case", handed_cases("f", "export_names"))
def test_exported_names_of_handed_cases(case: Case) -> None:
    model = case["input"]["model"]
    family = "qwen2_tied" if model["tie_word_embeddings"] else model["arch"]
    names = set(family_for(config_of(family, layers=model["layers"])).hf_tensors)
    assert set(case["expect"]["required"]) <= names
    assert names <= set(case["expect"]["required"]) | set(case["expect"]["optional"])


@pytest.mark.parametrize("case", handed_cases("f", "qkv_rows"))
def test_qkv_rows_of_handed_cases(case: Case) -> None:
    heads, groups, size = (case["input"][key] for key in ("heads", "kv_groups", "head_dim"))
    parts = [
        [f"{name}{head}.{row}" for head in range(count) for row in range(size)]
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    ]
    assert QKV.per_kv_group
    rows = labelled_rows(parts, case["input"]["tp"], groups // case["input"]["tp"])
    assert rows == case["expect"]["rows"]


@pytest.mark.parametrize("case", handed_cases("f", "gate_up_rows"))
def test_gate_up_rows_of_handed_cases(case: Case) -> None:
    parts = [[f"{name}{row}" for row in range(case["input"]["ffn"])] for name in "gu"]
    assert not GATE_UP.per_kv_group
    assert labelled_rows(parts, case["input"]["tp"], 1) == case["expect"]["rows"]


@pytest.mark.parametrize("case", handed_cases("f", "padded_vocab"))
def test_padded_vocabulary_of_handed_cases(case: Case) -> None:
    vocab, tp, multiple = (case["input"][key] for key in ("vocab", "tp", "divisible_by"))
    padded = padded_vocab_size(vocab, tp, divisible_by=multiple)
    assert padded == case["expect"]["padded"]
    kept = [shard_bounds(vocab, tp, index, padded) for index in range(tp)]
    assert sum(part.stop - part.start for part in kept) == case["expect"]["exported"]


@pytest.mark.parametrize("case", handed_cases("f", "expert_id"))
def test_expert_ids_of_handed_cases(case: Case) -> None:
    experts, ep, ep_rank, local = (
        case["input"][key] for key in ("experts", "ep", "ep_rank", "local")
    )
    assert (
        global_expert(ep_rank, experts_per_rank(experts, ep), local) == case["expect"]["global_id"]
    )


@pytest.mark.parametrize("case", handed_cases("f", "stage_layers"))
def test_stage_layers_of_handed_cases(case: Case) -> None:
    stages = stage_layers(case["input"]["layers"], case["input"]["pp"], case["input"]["vpp"])
    assert [[list(chunk) for chunk in stage] for stage in stages] == case["expect"]["stages"]


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_names_and_shapes_are_those_that_transformers_saves(family: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from safetensors.torch import load_file

    model = tiny_model(family, hidden_size=64, intermediate_size=96, vocab_size=500)
    model.save_pretrained(tmp_path)
    saved = {n: tuple(t.shape) for n, t in load_file(tmp_path / "model.safetensors").items()}
    assert family_for(model.config).hf_tensors == saved


PUBLISHED = {
    "Qwen2.5-32B": (
        transformers.Qwen2Config(
            num_hidden_layers=64,
            hidden_size=5120,
            intermediate_size=27648,
            num_attention_heads=40,
            num_key_value_heads=8,
            vocab_size=152064,
            tie_word_embeddings=False,
        ),
        32_763_876_352,
    ),
    "Qwen3-30B-A3B": (
        transformers.Qwen3MoeConfig(
            num_hidden_layers=48,
            hidden_size=2048,
            moe_intermediate_size=768,
            num_experts=128,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=False,
        ),
        30_532_122_624,
    ),
}
"""Configuration and parameter count of models on the hub."""


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_table_accounts_for_every_parameter_of_published_models(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert sum(math.prod(s) for s in family_for(config).hf_tensors.values()) == parameters


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_spelling_of_a_parameter_leads_back_to_its_entry(family: str) -> None:
    sizes = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.AutoConfig.for_model(family, **sizes)
    names = family_for(config)
    for entry in names.entries:
        for spelling in entry.rule.megatron:
            layer = None if entry.layer is None else entry.layer - 2
            expert = None if entry.expert is None else entry.expert - 3
            if (layer or 0) < 0 or (expert or 0) < 0:
                continue  # lies on another rank
            local = spelling.format(layer=layer, expert=expert)
            assert names.find(local, layers=[2, 3], first_expert=3) == entry


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'decoder\.layers\.0\.self_attention\.gate\.weight'"):
        family_for(config_of("qwen3")).find("decoder.layers.0.self_attention.gate.weight", [0], 0)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gpt2' of config\.json.*qwen3_moe"):
        family_for(transformers.GPT2Config())


def test_layers_without_experts_use_the_dense_names() -> None:
    config = config_of("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3])
    names = family_for(config).hf_tensors
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in names
    assert "model.layers.3.mlp.up_proj.weight" in names
    assert "model.layers.3.mlp.gate.weight" not in names


def test_a_tied_folder_may_carry_a_head_but_an_untied_one_may_not_carry_strangers() -> None:
    check_names(["lm_head.weight"], family_for(config_of("qwen2_tied")))
    check_names(["model.layers.0.self_attn.rotary_emb.inv_freq"], family_for(config_of("qwen2")))
    with pytest.raises(ValueError, match=r"'model\.layers\.9\.mlp\.up_proj\.weight'"):
        check_names(["model.layers.9.mlp.up_proj.weight"], family_for(config_of("qwen2")))


@given(
    groups=st.integers(1, 4),
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    width=st.integers(1, 3),
)
def test_fuse_and_unfuse_are_inverse(groups: int, rows: list[int], width: int) -> None:
    parts = [torch.randn(groups * count, width) for count in rows]
    local = fuse(parts, groups)
    back = unfuse(local, [part.shape[0] for part in parts], groups)
    assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True))


@given(size=st.integers(1, 40), shards=st.integers(1, 8), spare=st.integers(0, 12))
def test_padded_shards_cover_every_real_row_once(size: int, shards: int, spare: int) -> None:
    padded = -(-(size + spare) // shards) * shards
    parts = [shard_bounds(size, shards, index, padded) for index in range(shards)]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(size))


def test_uneven_cuts_are_refused() -> None:
    with pytest.raises(ValueError, match="dimension of 6 cannot be cut evenly over 4"):
        shard_bounds(6, 4, 0)
    with pytest.raises(ValueError, match=r"parallel\.pipeline=4"):
        stage_layers(6, 4)
    with pytest.raises(ValueError, match=r"parallel\.expert=3"):
        experts_per_rank(8, 3)
