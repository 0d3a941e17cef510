"""The trainer's side of a plan: which rank holds which part of which Hugging Face tensor.

Pure functions of a few sizes. Nothing here needs a process group, a device or Megatron, so that
an engine computes the same as the trainer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from megatron_dapo.config.schema import ParallelConfig
from megatron_dapo.parallel.rank_map import Coordinates, coordinates
from megatron_dapo.resharding.boxes import Piece
from megatron_dapo.resharding.cuts import shard_bounds
from megatron_dapo.resharding.name_map import Entry, Family, Rule


def stage_layers(num_layers: int, pp_size: int, chunks: int = 1) -> list[list[range]]:
    """Global layers (from 0) of each virtual chunk of each pipeline stage.

    Raises:
        ValueError: the layers do not divide evenly.
    """
    if num_layers % (pp_size * chunks):
        raise ValueError(
            f"{num_layers} layers cannot be cut evenly over parallel.pipeline={pp_size} stages "
            f"with {chunks} chunks each (parallel.virtual_pipeline): the product of both must "
            f"divide {num_layers}"
        )
    length = num_layers // (pp_size * chunks)
    return [
        [
            range((chunk * pp_size + stage) * length, (chunk * pp_size + stage + 1) * length)
            for chunk in range(chunks)
        ]
        for stage in range(pp_size)
    ]


def global_expert(ep_rank: int, experts_per_rank: int, local: int) -> int:
    """Number of a rank's local expert among all experts of its layer."""
    return ep_rank * experts_per_rank + local


def experts_per_rank(num_experts: int, ep_size: int) -> int:
    """Local experts of one layer.

    Raises:
        ValueError: the experts do not divide evenly.
    """
    if num_experts % ep_size:
        raise ValueError(
            f"{num_experts} experts cannot be cut evenly over parallel.expert={ep_size} ranks"
        )
    return num_experts // ep_size


def blocks(rule: Rule, family: Family, shards: int) -> int:
    """Blocks that `cuts.fuse` stacks on one of `shards` ranks.

    Raises:
        ValueError: a key/value group would have to be cut.
    """
    if not rule.cut.per_kv_group:
        return 1
    if family.kv_groups % shards:
        raise ValueError(
            f"{family.kv_groups} key/value groups (num_key_value_heads) cannot be cut evenly over "
            f"parallel.tensor={shards} ranks"
        )
    return family.kv_groups // shards


ShardKind = Literal["whole", "tensor", "expert"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of the model that the same ranks hold whole: its replicas share what it sends."""

    kind: ShardKind
    """whole: not divided over tensor ranks (norms, router). tensor: one tensor rank's part of the
    dense parameters. expert: one expert and expert-tensor rank's part of the experts."""
    stage: int
    expert: int
    """Expert rank; 0 for the other kinds."""
    index: int
    """Tensor rank, or expert-tensor rank; 0 for `whole`."""


Held = tuple[Shard, int]
"""A shard, and which of its replicas a rank is."""


def shard_kind(rule: Rule) -> ShardKind:
    """In which kind of shard the parameters of a rule lie."""
    if rule.per_expert:
        return "expert"
    return "whole" if rule.cut.dim is None else "tensor"


@dataclass(frozen=True, kw_only=True)
class TrainLayout:
    """The grid of trainer ranks, in Megatron's order tp-cp-ep-dp-pp."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Model chunks a stage."""
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    padded_vocab_size: int
    """Rows of embedding and head over all tensor ranks."""

    def __post_init__(self) -> None:
        for dimension, size in asdict(self).items():
            if size < 1:
                raise ValueError(f"{dimension}={size} of a trainer layout: must be at least 1")
        if self.stage_size % (self.expert * self.expert_tensor):
            raise ValueError(
                f"parallel.expert={self.expert} x expert_tensor={self.expert_tensor} must divide "
                f"tensor x context x data = {self.stage_size}, the ranks that experts are spread "
                "over"
            )
        if self.padded_vocab_size % self.tensor:
            raise ValueError(
                f"a padded vocabulary of {self.padded_vocab_size} rows must be a multiple of "
                f"parallel.tensor={self.tensor}; pad it further"
            )

    @classmethod
    def from_config(cls, parallel: ParallelConfig, padded_vocab_size: int) -> TrainLayout:
        """The grid of a run."""
        return cls(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline or 1,
            context=parallel.context,
            data=parallel.data,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor_size,
            padded_vocab_size=padded_vocab_size,
        )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        """Place of a global rank in every dimension."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        return coordinates(
            rank,
            tensor=self.tensor,
            context=self.context,
            data=self.data,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    def shards(self, rule: Rule) -> int:
        """Into how many parts a parameter is cut."""
        if rule.cut.dim is None:
            return 1
        return self.expert_tensor if rule.per_expert else self.tensor

    def stage_of(self, entry: Entry, family: Family) -> int:
        """Pipeline stage that holds a parameter."""
        if entry.rule.where != "layer":
            return {"first_stage": 0, "last_stage": self.pipeline - 1}[entry.rule.where]
        assert entry.layer is not None, f"{entry.rule.megatron} lies in no layer"
        length = family.num_layers // (self.pipeline * self.virtual_pipeline)
        return entry.layer // length % self.pipeline

    def replicas(self, shard: Shard) -> int:
        """How many ranks hold the shard."""
        cut = {"whole": 1, "tensor": self.tensor, "expert": self.expert * self.expert_tensor}
        return self.stage_size // cut[shard.kind]

    def rank(self, shard: Shard, replica: int) -> int:
        """Global rank of one replica of a shard."""
        inside = replica
        if shard.kind == "tensor":
            inside = replica * self.tensor + shard.index
        elif shard.kind == "expert":
            inside = (replica * self.expert + shard.expert) * self.expert_tensor + shard.index
        return shard.stage * self.stage_size + inside

    def holders(self, entry: Entry, family: Family) -> list[int]:
        """Global rank that speaks for all copies of each shard of a parameter, by shard."""
        expert = 0
        if entry.expert is not None:
            expert = entry.expert // experts_per_rank(family.num_experts, self.expert)
        kind, stage = shard_kind(entry.rule), self.stage_of(entry, family)
        shards = range(self.shards(entry.rule))
        return [self.rank(Shard(kind, stage, expert, index), 0) for index in shards]

    def slices(self, entry: Entry, index: int) -> list[slice]:
        """What shard `index` covers of each Hugging Face tensor, along the divided dimension."""
        cut = entry.rule.cut
        if cut.dim is None:
            return [slice(0, tensor.shape[0]) for tensor in entry.hf]
        padded, shards = self.padded_vocab_size if cut.padded else None, self.shards(entry.rule)
        return [shard_bounds(tensor.shape[cut.dim], shards, index, padded) for tensor in entry.hf]

    def shards_of(self, rank: int) -> dict[ShardKind, Held]:
        """The shard of each kind that a rank holds."""
        place = self.coordinates(rank)
        stage, inside = divmod(rank, self.stage_size)
        return {
            "whole": (Shard("whole", stage, 0, 0), inside),
            "tensor": (Shard("tensor", stage, 0, place.tensor), inside // self.tensor),
            "expert": (
                Shard("expert", stage, place.expert, place.expert_tensor),
                place.expert_data,
            ),
        }


def check_divides(train: TrainLayout, family: Family) -> None:
    """Refuse a grid that the model cannot be cut over.

    Raises:
        ValueError: layers, experts or a dimension do not divide evenly.
    """
    stage_layers(family.num_layers, train.pipeline, train.virtual_pipeline)
    experts_per_rank(family.num_experts, train.expert)
    if train.padded_vocab_size < family.vocab_size:
        raise ValueError(
            f"a padded vocabulary of {train.padded_vocab_size} rows cannot hold the model's "
            f"{family.vocab_size}; pad it to a multiple of parallel.tensor={train.tensor} above"
        )
    for rule in family.rules:
        source_pieces(rule, family, train, 0)


def matrix(rule: Rule, family: Family) -> tuple[list[int], int]:
    """(rows of each Hugging Face tensor, columns) of a parameter seen as a stack of matrices.

    A vector of n is n rows of one column. Tensors of one parameter have equal columns.
    """
    shapes = [tuple(family.dimensions[name] for name in dimensions) for _, dimensions in rule.hf]
    return [shape[0] for shape in shapes], shapes[0][1] if len(shapes[0]) > 1 else 1


def source_pieces(rule: Rule, family: Family, train: TrainLayout, index: int) -> tuple[Piece, ...]:
    """What shard `index` of a parameter holds, in the order of its rows.

    Raises:
        ValueError: a dimension does not divide evenly.
    """
    rows, columns = matrix(rule, family)
    shards, cut = train.shards(rule), rule.cut
    if cut.dim is None:
        return (Piece(0, sum(rows), 0, columns, 0, 0),)
    if cut.dim == 1:
        part = shard_bounds(columns, shards, index)
        return (Piece(0, sum(rows), part.start, part.stop - part.start, 0, 0),)
    padded = train.padded_vocab_size if cut.padded else None
    count = blocks(rule, family, shards)
    pieces, at = [], 0
    for block in range(count):
        offset = 0
        for size in rows:
            part = shard_bounds(size, shards, index, padded)
            length = (part.stop - part.start) // count
            if length:
                first = offset + part.start + block * length
                pieces.append(Piece(first, length, 0, columns, at, 0))
            at += length
            offset += size
    return tuple(pieces)


def source_shape(entry: Entry, family: Family, train: TrainLayout) -> tuple[int, ...]:
    """Shape of a parameter on each rank that holds a shard of it."""
    cut, (first, *_) = entry.rule.cut, entry.hf
    shards = train.shards(entry.rule)
    if cut.padded:
        return (train.padded_vocab_size // shards, *first.shape[1:])
    if cut.dim == 1:
        return (first.shape[0], first.shape[1] // shards)
    rows = sum(tensor.shape[0] for tensor in entry.hf) // shards
    return (rows, *first.shape[1:])
