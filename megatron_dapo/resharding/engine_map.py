"""The engine's side of a plan: how vLLM fuses and cuts Hugging Face tensors.

One declarative table a family, `ENGINE_FAMILIES`. A new family needs one here and one in
`name_map`, Megatron's. Pure functions of a few sizes; vLLM itself is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_dapo.resharding.block_grid import (
    BLOCK,
    SCALE_SUFFIX,
    Content,
    scales_box,
    scales_shape,
)
from megatron_dapo.resharding.boxes import Box, Piece, Placement
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.name_map import Entry, Family

VOCAB_MULTIPLE = 64
"""vLLM pads embedding and head to a multiple of this many rows (DEFAULT_VOCAB_PADDING_SIZE)."""
Cutting = Literal["whole", "rows", "columns", "heads", "vocab"]


@dataclass(frozen=True)
class Fused:
    """One kind of vLLM parameter and the Hugging Face tensors that are stacked in it."""

    parameter: str
    parts: tuple[str, ...]
    cut: Cutting
    """rows: each part by rows, the rank's parts stacked (ColumnParallel). columns: RowParallel.
    heads: rows, where a key/value head is copied once the tensor ranks outnumber the heads.
    vocab: rows of the padded vocabulary."""
    quantized: bool = False
    """A matrix of a layer: a quantised engine keeps it in fewer bits, a kernel may repack it."""

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.parts[0]


_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."
_EXPERT = _MLP + "experts.{expert}."


def _same(
    name: str, cut: Literal["whole", "columns", "vocab"], *, quantized: bool = False
) -> Fused:
    """A parameter of one tensor of the same name."""
    return Fused(name, (name,), cut, quantized)


_OUTSIDE_LAYERS = (
    _same("model.embed_tokens.weight", "vocab"),
    _same("model.norm.weight", "whole"),
    _same("lm_head.weight", "vocab"),  # a tied head is the embedding: no tensor, no parameter
)
_NORMS = (
    _same(_LAYER + "input_layernorm.weight", "whole"),
    _same(_LAYER + "post_attention_layernorm.weight", "whole"),
)
_PROJECTIONS = (
    Fused(
        _ATTENTION + "qkv_proj.weight",
        tuple(f"{_ATTENTION}{part}_proj.weight" for part in "qkv"),
        "heads",
        quantized=True,
    ),
    _same(_ATTENTION + "o_proj.weight", "columns", quantized=True),
)
_QKV_BIAS = (
    Fused(
        _ATTENTION + "qkv_proj.bias",
        tuple(f"{_ATTENTION}{part}_proj.bias" for part in "qkv"),
        "heads",
    ),
)
_QK_NORM = (
    _same(_ATTENTION + "q_norm.weight", "whole"),
    _same(_ATTENTION + "k_norm.weight", "whole"),
)
_DENSE_MLP = (
    Fused(
        _MLP + "gate_up_proj.weight",
        (_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
        "rows",
        quantized=True,
    ),
    _same(_MLP + "down_proj.weight", "columns", quantized=True),
)
_MOE_MLP = (
    _same(_MLP + "gate.weight", "whole"),
    Fused(
        _MLP + "experts.routed_experts.w13_weight",
        (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
        "rows",
        quantized=True,
    ),
    Fused(
        _MLP + "experts.routed_experts.w2_weight",
        (_EXPERT + "down_proj.weight",),
        "columns",
        quantized=True,
    ),
)

_LLAMA = _OUTSIDE_LAYERS + _NORMS + _PROJECTIONS + _DENSE_MLP
ENGINE_FAMILIES: Mapping[str, tuple[Fused, ...]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA + _QKV_BIAS,
    "qwen3": _LLAMA + _QK_NORM,
    "qwen3_moe": _LLAMA + _QK_NORM + _MOE_MLP,
}
"""`model_type` of the Hugging Face configuration -> vLLM's parameters."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where one Hugging Face tensor lands on one engine rank."""

    parameter: str
    """{layer} and {expert} still open."""
    piece: Piece
    """In the tensor's own rows; `to_row` for the rank's first expert."""
    expert_rows: int
    """Further down for each further expert of the rank."""


class EngineMap:
    """The table of one family for one engine layout.

    Raises:
        ValueError: a dimension cannot be cut over the engine's tensor ranks, or a Hugging Face
            tensor has no place in the table.
    """

    def __init__(self, family: Family, engine: EngineLayout) -> None:
        self.family = family
        self.engine = engine
        self.shapes = {
            name: tuple(family.dimensions[dimension] for dimension in dimensions)
            for rule in family.rules
            if rule.exported
            for name, dimensions in rule.hf
        }
        table = ENGINE_FAMILIES[family.model_type]
        self._place = {
            part: (fused, number) for fused in table for number, part in enumerate(fused.parts)
        }
        if missing := sorted(self.shapes.keys() - self._place.keys()):
            raise ValueError(
                f"Hugging Face tensors {missing} have no place in the engine table of "
                f"{family.model_type!r}; add them to resharding.engine_map"
            )
        self._check_heads()
        for name in self.shapes:
            self.target(name, 0)

    def _check_heads(self) -> None:
        """Whole heads on every rank: rows alone may divide where heads do not."""
        tensor, kv_heads = self.engine.tensor, self.family.kv_groups
        heads = self.family.dimensions["query"] // self.family.dimensions["head"]
        seen = f"rollout.engine_tensor={tensor}"
        if heads % tensor:
            raise ValueError(f"{seen} must divide the model's num_attention_heads={heads}")
        if kv_heads % tensor and tensor % kv_heads:
            raise ValueError(
                f"{seen} must divide the model's num_key_value_heads={kv_heads}, or be a multiple "
                "of them"
            )

    def fused(self, name: str) -> Fused:
        """The parameter that holds a Hugging Face tensor (name with {layer} and {expert} open)."""
        return self._place[name][0]

    def in_blocks(self, fused: Fused) -> bool:
        """Whether the engine keeps a parameter as values and scales of blocks."""
        return fused.quantized and self.engine.quantization is not None

    def target(self, name: str, rank: int) -> Target:
        """Where a Hugging Face tensor (name with {layer} and {expert} open) lands.

        Args:
            rank: tensor rank of the engine; of an expert's tensor, one that has the expert.
        """
        fused, number = self._place[name]
        pieces = [self._piece(fused, part, rank) for part in fused.parts]
        piece = pieces[number]
        stacked = [one.rows for one in pieces]
        if fused.cut not in ("rows", "heads"):
            return Target(fused.parameter, piece, stacked[0] if fused.per_expert else 0)
        at = Piece(piece.row, piece.rows, piece.col, piece.cols, sum(stacked[:number]), 0)
        return Target(fused.parameter, at, sum(stacked) if fused.per_expert else 0)

    def local_expert(self, expert: int | None, rank: int) -> int | None:
        """Place of an expert among those of a rank (0 for a tensor of no expert); None: not there.

        Whole experts are dealt in runs, and the first ranks get one more where they do not divide
        evenly (vLLM's "linear" placement).
        """
        if expert is None:
            return 0
        mine = self.experts(rank)
        return expert - mine.start if expert in mine else None

    def experts(self, rank: int) -> range:
        """Experts of each MoE layer that a rank holds, whole or in part."""
        total = self.family.num_experts
        if not self.engine.expert_parallel:
            return range(total)
        each, spare = divmod(total, self.engine.tensor)
        first = rank * each + min(rank, spare)
        return range(first, first + each + (rank < spare))

    def _matrix(self, name: str) -> tuple[int, int]:
        shape = self.shapes[name]
        return shape[0], shape[1] if len(shape) > 1 else 1

    def _piece(self, fused: Fused, name: str, rank: int) -> Piece:
        """What a rank holds of one tensor, at row 0."""
        rows, columns = self._matrix(name)
        parts, index = self.engine.tensor, rank
        if fused.cut == "whole" or (fused.per_expert and self.engine.expert_parallel):
            parts, index = 1, 0
        elif fused.cut == "heads" and name != fused.parts[0]:
            parts, index = self._kv_place(rank)
        if fused.cut == "columns":
            length = self._divide(columns, parts, name)
            return Piece(0, rows, index * length, length, 0, 0)
        if fused.cut == "vocab":
            length = self._divide(self.padded_vocab_size, parts, name)
            first = min(index * length, rows)
            return Piece(first, min(length, rows - first), 0, columns, 0, 0)
        length = self._divide(rows, parts, name)
        return Piece(index * length, length, 0, columns, 0, 0)

    def _kv_place(self, rank: int) -> tuple[int, int]:
        """(parts that keys and values are cut into, which of them a rank holds)."""
        parts = min(self.engine.tensor, self.family.kv_groups)
        return parts, rank // (self.engine.tensor // parts)

    def _divide(self, size: int, parts: int, name: str) -> int:
        if size % parts:
            raise ValueError(
                f"{name}: {size} cannot be cut evenly over {parts} for "
                f"rollout.engine_tensor={self.engine.tensor}; use a divisor"
            )
        return size // parts

    @cached_property
    def padded_vocab_size(self) -> int:
        """Rows of the engine's embedding and head over all tensor ranks."""
        return math.ceil(self.family.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def contents(self, rank: int) -> Iterator[tuple[str, Content, tuple[int, ...]]]:
        """(name, content, shape) of every parameter of a rank that is written, in family order."""
        for entry in self._first_entries():
            for fused in self._fused_of(entry):
                name, shape = self._shape(fused, entry, rank)
                if self.in_blocks(fused):
                    yield name, "values", shape
                    yield name + SCALE_SUFFIX, "scales", scales_shape(shape)
                else:
                    yield name, "plain", shape

    def parameters(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter of a rank that is written, in family order."""
        return {name: shape for name, _, shape in self.contents(rank)}

    def owned_bytes(self, rank: int) -> int:
        """Bytes of these parameters, without padding."""
        padding = sum(box.elements for _, box in self.padding(rank)) * self.engine.item_bytes
        sizes = (
            math.prod(shape) * self.engine.bytes_of(content)
            for _, content, shape in self.contents(rank)
        )
        return sum(sizes) - padding

    def padding(self, rank: int) -> list[tuple[str, Box]]:
        """Rows of a rank's parameters that no Hugging Face tensor fills; vLLM keeps zeros there."""
        found = []
        for entry in self._first_entries():
            for fused in self._fused_of(entry):
                if fused.cut == "vocab":
                    name, (rows, columns) = self._shape(fused, entry, rank)
                    real = self._piece(fused, fused.parts[0], rank).rows
                    if real < rows:
                        found.append((name, Box(real, rows - real, 0, columns)))
        return found

    def quantized_tensors(self) -> tuple[str, ...]:
        """Hugging Face tensors that the engine keeps as values and scales, in family order."""
        return tuple(
            tensor.name
            for entry in self.family.entries
            if entry.rule.exported
            for tensor, (name, _) in zip(entry.hf, entry.rule.hf, strict=True)
            if self.in_blocks(self.fused(name))
        )

    def placements(self, rank: int) -> Iterator[Placement]:
        """Every box of a Hugging Face tensor that an engine rank holds, in the order of the family.

        Padding is in no box. Scales are a tensor of their own, as in FP8 checkpoints.
        """
        for entry in self.family.entries:
            local = self.local_expert(entry.expert, rank)
            if not entry.rule.exported or local is None:
                continue
            for tensor, (name, _) in zip(entry.hf, entry.rule.hf, strict=True):
                target = self.target(name, rank)
                piece = target.piece
                parameter = target.parameter.format(layer=entry.layer, expert=entry.expert)
                at = piece.to_row + local * target.expert_rows
                box = Box(piece.row, piece.rows, piece.col, piece.cols)
                if piece.rows:
                    yield Placement(tensor.name, box, parameter, at, piece.to_col)
                if piece.rows and self.in_blocks(self.fused(name)):
                    yield Placement(
                        tensor.name + SCALE_SUFFIX,
                        scales_box(box),
                        parameter + SCALE_SUFFIX,
                        at // BLOCK,
                        piece.to_col // BLOCK,
                    )

    def _first_entries(self) -> Iterator[Entry]:
        """Entries without those of the second and further experts."""
        return (e for e in self.family.entries if e.rule.exported and not e.expert)

    def _fused_of(self, entry: Entry) -> list[Fused]:
        return list(dict.fromkeys(self.fused(name) for name, _ in entry.rule.hf))

    def _shape(self, fused: Fused, entry: Entry, rank: int) -> tuple[str, tuple[int, ...]]:
        pieces = [self._piece(fused, part, rank) for part in fused.parts]
        rows = sum(piece.rows for piece in pieces)
        if fused.cut == "vocab":
            rows = self.padded_vocab_size // self.engine.tensor
        shape: tuple[int, ...] = (rows, pieces[0].cols)
        if len(self.shapes[fused.parts[0]]) == 1:
            shape = (rows,)
        if fused.per_expert:
            shape = (len(self.experts(rank)), *shape)
        return fused.parameter.format(layer=entry.layer), shape
