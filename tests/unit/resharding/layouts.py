"""Random layouts of both sides, models of numbered elements, and vLLM's rules written once more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor

from megatron_dapo.resharding.boxes import Box, Piece, Placement
from megatron_dapo.resharding.layout import shard_place
from megatron_dapo.resharding.load import _fill
from megatron_dapo.resharding.name_map import Entry, Family, HfTensor, family_for
from megatron_dapo.resharding.plan import EngineLayout, TrainLayout
from megatron_dapo.resharding.train_map import (
    experts_per_rank,
    source_pieces,
    source_shape,
    stage_layers,
)


@dataclass(frozen=True)
class Case:
    """One model on one pair of layouts."""

    config: transformers.PretrainedConfig
    train: TrainLayout
    engine: EngineLayout
    bucket_bytes: int

    @property
    def family(self) -> Family:
        return family_for(self.config)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Layouts of up to 64 x 16 ranks; every family, tied or not, whole or split key/value heads."""
    name = draw(st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe"]))
    tensor, engine_tensor = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 8]))
    pipeline = draw(st.sampled_from([1, 2]))
    virtual = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    context, data = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    kv_heads = tensor * draw(st.sampled_from([1, 2]))
    heads = max(kv_heads, engine_tensor) * draw(st.sampled_from([1, 2]))
    head = draw(st.sampled_from([2, 3, 4]))
    vocab = draw(st.integers(20, 200))
    sizes: dict[str, object] = {
        "num_hidden_layers": pipeline * virtual * draw(st.sampled_from([1, 2])),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "hidden_size": heads * head if name in ("llama", "qwen2") else 10,
        "intermediate_size": 8 * draw(st.sampled_from([1, 3])),
        "vocab_size": vocab,
        "tie_word_embeddings": draw(st.booleans()),
    }
    expert, expert_tensor, expert_parallel = 1, tensor, False
    if name == "qwen3_moe":
        inside = tensor * context * data
        sizes["num_experts"] = draw(st.sampled_from([6, 8]))
        sizes["moe_intermediate_size"] = 8
        sizes["decoder_sparse_step"] = draw(st.sampled_from([1, 2]))
        expert = draw(st.sampled_from([n for n in (1, 2) if inside % n == 0]))
        expert_tensor = draw(st.sampled_from([n for n in (1, 2, 4) if inside % (expert * n) == 0]))
        expert_parallel = draw(st.booleans()) and engine_tensor <= 4
    spare = draw(st.sampled_from([0, 5, 40]))
    return Case(
        transformers.AutoConfig.for_model(name, **sizes),
        TrainLayout(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual,
            context=context,
            data=data,
            expert=expert,
            expert_tensor=expert_tensor,
            padded_vocab_size=-(-(vocab + spare) // tensor) * tensor,
        ),
        EngineLayout(
            tensor=engine_tensor,
            replicas=draw(st.sampled_from([1, 2])),
            expert_parallel=expert_parallel,
            dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        ),
        draw(st.sampled_from([100, 3000, 10**6])),
    )


def numbered(family: Family) -> dict[str, Tensor]:
    """The model's Hugging Face tensors; every element has its own number, from 1."""
    found, first = {}, 1
    for name, shape in family.hf_tensors.items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(first, first + count).view(shape)
        first += count
    return found


class NumberedFolder:
    """Stands in for `load.HfFolder`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, tensor: HfTensor, dim: int, part: slice) -> Tensor:
        value = self.tensors[tensor.name]
        return value[part] if dim == 0 else value[:, part]


def train_parameters(case: Case, tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What a trainer rank holds after `load_hf_weights`, by `Entry.key`."""
    family, train, place = case.family, case.train, case.train.coordinates(rank)
    chunks = stage_layers(family.num_layers, train.pipeline, train.virtual_pipeline)
    layers = {layer for chunk in chunks[place.pipeline] for layer in chunk}
    per_rank = family.num_experts // train.expert
    experts = range(place.expert * per_rank, (place.expert + 1) * per_rank)
    parallel = SimpleNamespace(
        tp_size=train.tensor,
        tp_rank=place.tensor,
        etp_size=train.expert_tensor,
        etp_rank=place.expert_tensor,
    )
    found = {}
    for entry in family.entries:
        here = {
            "first_stage": place.pipeline == 0,
            "last_stage": place.pipeline == train.pipeline - 1,
            "layer": entry.layer in layers and (entry.expert is None or entry.expert in experts),
        }[entry.rule.where]
        if here and entry.rule.exported:
            value = torch.full(source_shape(entry, family, train), -1)
            folder = NumberedFolder(tensors)
            _fill(value, entry, family, folder, shard_place(entry, parallel))  # type: ignore[arg-type]
            found[entry.key] = value
    return found


def holds(entry: Entry, family: Family, train: TrainLayout, rank: int) -> bool:
    """Whether a rank has a shard of a parameter."""
    place = train.coordinates(rank)
    if train.stage_of(entry, family) != place.pipeline:
        return False
    per_rank = experts_per_rank(family.num_experts, train.expert)
    return entry.expert is None or entry.expert // per_rank == place.expert


def train_placements(family: Family, train: TrainLayout, rank: int) -> Iterator[Placement]:
    """Every box of a Hugging Face tensor that a trainer rank holds, in the order of the family.

    `Placement.parameter` is `Entry.key`. Padding rows are in no box.
    """
    place = train.coordinates(rank)
    for entry in family.entries:
        if not entry.rule.exported or not holds(entry, family, train, rank):
            continue
        index = place.expert_tensor if entry.expert is not None else place.tensor
        index = 0 if entry.rule.cut.dim is None else index
        for piece in source_pieces(entry.rule, family, train, index):
            yield from _split(entry, piece)


def _split(entry: Entry, piece: Piece) -> Iterator[Placement]:
    """The piece by Hugging Face tensor: a stack of several may lie in one."""
    offset = 0
    for tensor in entry.hf:
        start = max(piece.row, offset)
        stop = min(piece.row + piece.rows, offset + tensor.shape[0])
        if start < stop:
            yield Placement(
                tensor.name,
                Box(start - offset, stop - start, piece.col, piece.cols),
                entry.key,
                piece.to_row + start - piece.row,
                piece.to_col,
            )
        offset += tensor.shape[0]


def vllm_parameters(case: Case, tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What vLLM's own weight loaders leave on one tensor rank: its rules, written once more."""
    tp, config = case.engine.tensor, case.config
    found: dict[str, Tensor] = {}

    def part(value: Tensor, dim: int, parts: int = tp, index: int = rank) -> Tensor:
        return value.chunk(parts, dim)[index]

    def vocabulary(value: Tensor) -> Tensor:
        padded = torch.zeros((value.shape[0] + 63) // 64 * 64, *value.shape[1:], dtype=value.dtype)
        padded[: value.shape[0]] = value
        return part(padded, 0)

    def heads(prefix: str, kind: str) -> Tensor:
        kv = min(config.num_key_value_heads, tp)
        query, key, value = (tensors[f"{prefix}{name}_proj.{kind}"] for name in "qkv")
        shared = rank // (tp // kv)
        return torch.cat([part(query, 0), part(key, 0, kv, shared), part(value, 0, kv, shared)])

    def experts(prefix: str) -> None:
        each = range(config.num_experts)
        if case.engine.expert_parallel:
            base, more = divmod(config.num_experts, tp)
            counts = [base + (index < more) for index in range(tp)]
            each = range(sum(counts[:rank]), sum(counts[: rank + 1]))
        whole = (1, 0) if case.engine.expert_parallel else (tp, rank)
        gate_up, down = [], []
        for expert in each:
            gate, up, back = (
                tensors[f"{prefix}experts.{expert}.{name}_proj.weight"]
                for name in ("gate", "up", "down")
            )
            gate_up.append(torch.cat([part(gate, 0, *whole), part(up, 0, *whole)]))
            down.append(part(back, 1, *whole))
        found[prefix + "experts.routed_experts.w13_weight"] = torch.stack(gate_up)
        found[prefix + "experts.routed_experts.w2_weight"] = torch.stack(down)

    for name, value in tensors.items():
        prefix = name.rsplit(".", 2)[0] + "."
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            found[name] = vocabulary(value)
        elif "q_proj." in name:
            kind = name.rsplit(".", 1)[1]
            found[f"{prefix}qkv_proj.{kind}"] = heads(prefix, kind)
        elif name.endswith("experts.0.gate_proj.weight"):
            experts(name.removesuffix("experts.0.gate_proj.weight"))
        elif name.endswith("mlp.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            found[prefix + "gate_up_proj.weight"] = torch.cat([part(value, 0), part(up, 0)])
        elif name.endswith(("o_proj.weight", "mlp.down_proj.weight")):
            found[name] = part(value, 1)
        elif "norm" in name or name.endswith("mlp.gate.weight"):
            found[name] = value
    return found


def matrix_box(value: Tensor, box: Box) -> Tensor:
    """A view of a tensor seen as a matrix; fused experts are experts * rows."""
    matrix = value.view(-1, value.shape[-1] if value.dim() > 1 else 1)
    assert box.rows > 0 and box.cols > 0, box
    assert box.row + box.rows <= matrix.shape[0], box
    assert box.col + box.cols <= matrix.shape[1], box
    return matrix[box.row : box.row + box.rows, box.col : box.col + box.cols]
