"""What one kind of parameter sends from one shard to one engine rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_dapo.resharding.block_grid import (
    BLOCK,
    SCALE_BYTES,
    SCALE_SUFFIX,
    BlockSource,
    Content,
    begin_in,
    blocks_on_several,
)
from megatron_dapo.resharding.boxes import Crossing, cross
from megatron_dapo.resharding.engine_map import EngineMap
from megatron_dapo.resharding.lines import Segment, segments
from megatron_dapo.resharding.name_map import Family, Rule
from megatron_dapo.resharding.train_map import TrainLayout, matrix, shard_kind, source_pieces


@dataclass(frozen=True, slots=True)
class Route:
    """All crossings of one Hugging Face tensor, from one shard to one engine rank."""

    tensor: int
    """Which tensor of the parameter."""
    target: str
    """Engine parameter with {layer} and {expert} open."""
    expert_rows: int
    """Further down in it for each further expert of the engine rank."""
    first_col: int
    """Column of the tensor that the engine rank's part begins at."""
    crossings: tuple[Crossing, ...]


class Kind:
    """What the parameters of one rule share, whatever their layer and expert."""

    def __init__(
        self, rule: Rule, family: Family, train: TrainLayout, engine_map: EngineMap
    ) -> None:
        self.rule = rule
        self._family, self._train, self._map = family, train, engine_map
        self.rows, columns = matrix(rule, family)
        self.total_rows = sum(self.rows)
        self.in_blocks = engine_map.in_blocks(engine_map.fused(rule.hf[0][0]))
        self.content: Content = "values" if self.in_blocks else "plain"
        self._item_bytes = engine_map.engine.bytes_of(self.content)
        self.step = BLOCK if self.in_blocks else 1
        self.step_bytes = self.step * columns * self._item_bytes
        self.blocks = (self.total_rows // BLOCK, columns // BLOCK) if self.in_blocks else (0, 0)
        if self.in_blocks:
            self._check_blocks()
            self.step_bytes += self.blocks[1] * SCALE_BYTES
        self.shard_kind = shard_kind(rule)
        whole_experts = rule.per_expert and engine_map.engine.expert_parallel
        self._receivers = 1 if whole_experts else engine_map.engine.tensor
        self._routes: dict[tuple[int, int], tuple[Route, ...]] = {}
        self._segments: dict[int, tuple[Segment, ...]] = {}

    def _check_blocks(self) -> None:
        """Whole blocks on every engine rank: vLLM cuts no others, and its kernels take no others.

        Raises:
            ValueError: the engine's part of a tensor is no multiple of a block.
        """
        ranks = self._map.engine.tensor
        for name, _ in self.rule.hf:
            piece = self._map.target(name, 0).piece
            for what, size in (("rows", piece.rows), ("columns", piece.cols)):
                if size % BLOCK:
                    raise ValueError(
                        f"{name}: the {size} {what} of a rank of rollout.engine_tensor={ranks} do "
                        f"not fill blocks of {BLOCK} x {BLOCK}, each of which has a scale with "
                        "rollout.engine_quantization=fp8. Leave that out, or use another "
                        "engine_tensor"
                    )

    @cached_property
    def shared_blocks(self) -> int:
        """Blocks of an FP8 parameter that lie on several shards of it."""
        if not self.in_blocks:
            return 0
        shards = range(self._train.shards(self.rule))
        return blocks_on_several(
            source_pieces(self.rule, self._family, self._train, shard) for shard in shards
        )

    def block_source(self, shard: int) -> BlockSource:
        """What a trainer rank with a shard of an FP8 parameter must know of its blocks."""
        pieces = source_pieces(self.rule, self._family, self._train, shard)
        return BlockSource(pieces, self.blocks, self.shard_kind, self.shared_blocks > 0)

    def routes(self, shard: int, receiver: int) -> tuple[Route, ...]:
        """By Hugging Face tensor, in order; without those where nothing crosses.

        Args:
            receiver: tensor rank of an engine; of an expert, one that has it.
        """
        if self._receivers == 1:
            receiver = 0  # one rank has the whole expert, and each has the same of its own
        if (shard, receiver) not in self._routes:
            self._routes[shard, receiver] = tuple(self._cross(shard, receiver))
        return self._routes[shard, receiver]

    def _cross(self, shard: int, receiver: int) -> Iterator[Route]:
        sources = source_pieces(self.rule, self._family, self._train, shard)
        offset = 0
        for number, (name, _) in enumerate(self.rule.hf):
            target = self._map.target(name, receiver)
            piece = target.piece.moved_down(offset)
            found = tuple(c for source in sources if (c := cross(source, piece)) is not None)
            if found:
                first_col = target.piece.col
                yield Route(number, target.parameter, target.expert_rows, first_col, found)
            offset += self.rows[number]

    def all_routes(self, shard: int) -> Iterator[Route]:
        """Those to all ranks of an engine that get something."""
        for receiver in range(self._receivers):
            yield from self.routes(shard, receiver)

    def segments(self, shard: int) -> tuple[Segment, ...]:
        """What a shard sends of one parameter to all ranks of an engine, row by row."""
        if shard not in self._segments:
            crossings = (c for route in self.all_routes(shard) for c in route.crossings)
            self._segments[shard] = segments(crossings, self._item_bytes, in_blocks=self.in_blocks)
        return self._segments[shard]

    def received_bytes(self, receiver: int) -> int:
        """Bytes of one parameter that an engine rank gets."""
        pieces = [self._map.target(name, receiver).piece for name, _ in self.rule.hf]
        elements = sum(piece.rows * piece.cols for piece in pieces)
        scales = elements // BLOCK**2 * SCALE_BYTES if self.in_blocks else 0
        return elements * self._item_bytes + scales

    def bytes_of_boxes(self) -> Iterator[tuple[str, Content, int]]:
        """(target, content, bytes that divide offset and width of its boxes) of each route."""
        for shard in range(self._train.shards(self.rule)):
            for route in self.all_routes(shard):
                cuts = (math.gcd(c.cols, c.target_col) for c in route.crossings)
                yield route.target, self.content, math.gcd(*cuts) * self._item_bytes
                if self.in_blocks:
                    begun = (begin_in(c.target_col, c.cols) for c in route.crossings)
                    cut = math.gcd(*(math.gcd(*each) for each in begun if each[1]))
                    yield route.target + SCALE_SUFFIX, "scales", cut * SCALE_BYTES
