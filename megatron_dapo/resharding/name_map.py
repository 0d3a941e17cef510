"""Megatron parameter names and Hugging Face tensor names: one table, read both ways.

A model family is a tuple of rules. A new family needs one here, and vLLM's table in `engine_map`.
The rules also state the shape of every Hugging Face tensor, so that a folder can be checked
before it is read and an export can be announced before it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from transformers import PretrainedConfig

from megatron_dapo.resharding.cuts import GATE_UP, QKV, REPLICATED, ROW, VOCAB, Cut

Condition = Literal["always", "dense", "moe", "tied", "untied"]


@dataclass(frozen=True)
class Rule:
    """One kind of Megatron parameter and the Hugging Face tensors that it is made of."""

    megatron: tuple[str, ...]
    """Spellings: of the local modules, then of Transformer Engine where it differs. {layer} is
    the place in the chunk and {expert} the place on the rank."""
    cut: Cut
    hf: tuple[tuple[str, tuple[str, ...]], ...]
    """Name and dimensions of each tensor, in the order of the fused parameter. {layer} and
    {expert} count over the whole model."""
    where: Literal["first_stage", "layer", "last_stage"] = "layer"
    condition: Condition = "always"
    exported: bool = True
    """False: a copy of a tensor that another rule exports."""

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron[0]


_HERE = "decoder.layers.{layer}."
_THERE = "model.layers.{layer}."

_OUTSIDE_LAYERS = (
    Rule(
        ("embedding.word_embeddings.weight",),
        VOCAB,
        (("model.embed_tokens.weight", ("vocab", "hidden")),),
        where="first_stage",
    ),
    Rule(
        ("decoder.final_layernorm.weight",),
        REPLICATED,
        (("model.norm.weight", ("hidden",)),),
        where="last_stage",
    ),
    Rule(
        ("output_layer.weight",),
        VOCAB,
        (("lm_head.weight", ("vocab", "hidden")),),
        where="last_stage",
        condition="untied",
    ),
    Rule(  # the last stage's copy of a tied embedding that lives on the first stage
        ("output_layer.weight",),
        VOCAB,
        (("model.embed_tokens.weight", ("vocab", "hidden")),),
        where="last_stage",
        condition="tied",
        exported=False,
    ),
)
_NORMS = (
    Rule(
        (_HERE + "input_layernorm.weight", _HERE + "self_attention.linear_qkv.layer_norm_weight"),
        REPLICATED,
        ((_THERE + "input_layernorm.weight", ("hidden",)),),
    ),
    Rule(
        (_HERE + "pre_mlp_layernorm.weight", _HERE + "mlp.linear_fc1.layer_norm_weight"),
        REPLICATED,
        ((_THERE + "post_attention_layernorm.weight", ("hidden",)),),
    ),
)
_ATTENTION = (
    Rule(
        (_HERE + "self_attention.linear_qkv.weight",),
        QKV,
        (
            (_THERE + "self_attn.q_proj.weight", ("query", "hidden")),
            (_THERE + "self_attn.k_proj.weight", ("key", "hidden")),
            (_THERE + "self_attn.v_proj.weight", ("key", "hidden")),
        ),
    ),
    Rule(
        (_HERE + "self_attention.linear_proj.weight",),
        ROW,
        ((_THERE + "self_attn.o_proj.weight", ("hidden", "query")),),
    ),
)
_QKV_BIAS = (
    Rule(
        (_HERE + "self_attention.linear_qkv.bias",),
        QKV,
        (
            (_THERE + "self_attn.q_proj.bias", ("query",)),
            (_THERE + "self_attn.k_proj.bias", ("key",)),
            (_THERE + "self_attn.v_proj.bias", ("key",)),
        ),
    ),
)
_QK_NORM = (
    Rule(
        (_HERE + "self_attention.q_layernorm.weight",),
        REPLICATED,
        ((_THERE + "self_attn.q_norm.weight", ("head",)),),
    ),
    Rule(
        (_HERE + "self_attention.k_layernorm.weight",),
        REPLICATED,
        ((_THERE + "self_attn.k_norm.weight", ("head",)),),
    ),
)
_DENSE_MLP = (
    Rule(
        (_HERE + "mlp.linear_fc1.weight",),
        GATE_UP,
        (
            (_THERE + "mlp.gate_proj.weight", ("ffn", "hidden")),
            (_THERE + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        condition="dense",
    ),
    Rule(
        (_HERE + "mlp.linear_fc2.weight",),
        ROW,
        ((_THERE + "mlp.down_proj.weight", ("hidden", "ffn")),),
        condition="dense",
    ),
)
_EXPERTS = _HERE + "mlp.experts."
_MOE_MLP = (
    Rule(
        (_HERE + "mlp.router.weight",),
        REPLICATED,
        ((_THERE + "mlp.gate.weight", ("experts", "hidden")),),
        condition="moe",
    ),
    Rule(
        (
            _EXPERTS + "local_experts.{expert}.linear_fc1.weight",
            _EXPERTS + "linear_fc1.weight{expert}",
        ),
        GATE_UP,
        (
            (_THERE + "mlp.experts.{expert}.gate_proj.weight", ("expert_ffn", "hidden")),
            (_THERE + "mlp.experts.{expert}.up_proj.weight", ("expert_ffn", "hidden")),
        ),
        condition="moe",
    ),
    Rule(
        (
            _EXPERTS + "local_experts.{expert}.linear_fc2.weight",
            _EXPERTS + "linear_fc2.weight{expert}",
        ),
        ROW,
        ((_THERE + "mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn")),),
        condition="moe",
    ),
)

_LLAMA = _OUTSIDE_LAYERS + _NORMS + _ATTENTION + _DENSE_MLP
FAMILIES: Mapping[str, tuple[Rule, ...]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA + _QKV_BIAS,
    "qwen3": _LLAMA + _QK_NORM,
    "qwen3_moe": _LLAMA + _QK_NORM + _MOE_MLP,
}
"""`model_type` of the Hugging Face configuration -> rules."""


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a Hugging Face folder."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One parameter of the whole model: a rule at one layer and expert."""

    rule: Rule
    layer: int | None
    """From 0 over the whole model."""
    expert: int | None
    """From 0 over all expert-parallel ranks."""
    hf: tuple[HfTensor, ...]

    @property
    def key(self) -> str:
        """What a plan calls the parameter: its first Hugging Face tensor (qkv: q_proj)."""
        return self.hf[0].name


class Family:
    """The rules of one model: `entries` lists all its parameters, `find` reads a name."""

    def __init__(self, rules: tuple[Rule, ...], hf_config: PretrainedConfig) -> None:
        config = hf_config.to_dict()
        self.model_type: str = hf_config.model_type
        self.num_layers: int = hf_config.num_hidden_layers
        self.kv_groups: int = hf_config.num_key_value_heads
        self.vocab_size: int = hf_config.vocab_size
        self.tied: bool = hf_config.tie_word_embeddings
        self.rules = tuple(rule for rule in rules if self._applies(rule))
        head = config.get("head_dim") or hf_config.hidden_size // hf_config.num_attention_heads
        self.dimensions = {
            "vocab": self.vocab_size,
            "hidden": hf_config.hidden_size,
            "ffn": hf_config.intermediate_size,
            "head": head,
            "query": head * hf_config.num_attention_heads,
            "key": head * self.kv_groups,
        }
        self.num_experts = 0
        self.moe_layers: frozenset[int] = frozenset()
        if any(rule.condition == "moe" for rule in rules):
            self.num_experts = hf_config.num_experts
            self.dimensions["experts"] = self.num_experts
            self.dimensions["expert_ffn"] = hf_config.moe_intermediate_size
            self.moe_layers = frozenset(
                layer
                for layer in range(self.num_layers)
                if (layer + 1) % hf_config.decoder_sparse_step == 0
                and layer not in hf_config.mlp_only_layers
            )
        self._patterns = [
            (re.compile(_as_pattern(spelling)), rule)
            for rule in self.rules
            for spelling in rule.megatron
        ]

    def _applies(self, rule: Rule) -> bool:
        return rule.condition not in ("tied", "untied") or (rule.condition == "tied") == self.tied

    def entry(self, rule: Rule, layer: int | None, expert: int | None) -> Entry:
        """`rule` at one layer and expert, with names and shapes filled in."""
        tensors = tuple(
            HfTensor(
                name.format(layer=layer, expert=expert),
                tuple(self.dimensions[dimension] for dimension in dimensions),
            )
            for name, dimensions in rule.hf
        )
        return Entry(rule, layer, expert, tensors)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every parameter of the model: embedding, layers in order, final norm, head."""
        return tuple(self._entries())

    def _entries(self) -> Iterator[Entry]:
        yield from (self.entry(r, None, None) for r in self.rules if r.where == "first_stage")
        layer_rules = [rule for rule in self.rules if rule.where == "layer"]
        for layer in range(self.num_layers):
            other = "dense" if layer in self.moe_layers else "moe"
            for rule in layer_rules:
                if rule.condition == other:
                    continue
                experts = range(self.num_experts) if rule.per_expert else (None,)
                yield from (self.entry(rule, layer, expert) for expert in experts)
        yield from (self.entry(r, None, None) for r in self.rules if r.where == "last_stage")

    @cached_property
    def hf_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of an exported folder, in the order of export."""
        return {
            tensor.name: tensor.shape
            for entry in self.entries
            if entry.rule.exported
            for tensor in entry.hf
        }

    def find(self, name: str, layers: Sequence[int], first_expert: int) -> Entry:
        """The entry of a parameter of one model chunk.

        Args:
            name: as `chunk.named_parameters()` gives it.
            layers: global number (from 0) of each layer of the chunk.
            first_expert: global number of the rank's first expert.

        Raises:
            ValueError: no rule knows the name, so it could be neither loaded nor exported.
        """
        for pattern, rule in self._patterns:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            numbers = {key: int(text) for key, text in match.groupdict().items()}
            layer = layers[numbers["layer"]] if "layer" in numbers else None
            expert = first_expert + numbers["expert"] if "expert" in numbers else None
            return self.entry(rule, layer, expert)
        raise ValueError(
            f"model parameter {name!r} has no Hugging Face name in the table of this family; "
            "it could be neither loaded nor sent to the engines. Add a rule for it to "
            "resharding.name_map, or build the model without it"
        )


def _as_pattern(spelling: str) -> str:
    escaped = re.escape(spelling)
    for number in ("layer", "expert"):
        escaped = escaped.replace(rf"\{{{number}\}}", rf"(?P<{number}>\d+)")
    return escaped


def family_for(hf_config: PretrainedConfig) -> Family:
    """The rules of the model that `hf_config` describes.

    Raises:
        ValueError: there is no table for its `model_type`.
    """
    if hf_config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type {hf_config.model_type!r} of config.json is not supported; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    return Family(FAMILIES[hf_config.model_type], hf_config)
