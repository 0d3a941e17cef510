"""What one kind of parameter sends from one shard to one engine rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.resharding.boxes import Crossing, cross
from megatron_dapo.resharding.engine_map import EngineMap
from megatron_dapo.resharding.lines import Segment, segments
from megatron_dapo.resharding.name_map import Family, Rule
from megatron_dapo.resharding.train_map import ShardKind, TrainLayout, matrix, source_pieces


@dataclass(frozen=True, slots=True)
class Route:
    """All crossings of one Hugging Face tensor, from one shard to one engine rank."""

    tensor: int
    """Which tensor of the parameter."""
    target: str
    """Engine parameter with {layer} and {expert} open."""
    expert_rows: int
    """Further down in it for each further expert of the engine rank."""
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
        self.row_bytes = columns * engine_map.engine.item_bytes
        self.shard_kind: ShardKind = "tensor"
        if rule.per_expert:
            self.shard_kind = "expert"
        elif rule.cut.dim is None:
            self.shard_kind = "whole"
        whole_experts = rule.per_expert and engine_map.engine.expert_parallel
        self._receivers = 1 if whole_experts else engine_map.engine.tensor
        self._routes: dict[tuple[int, int], tuple[Route, ...]] = {}
        self._segments: dict[int, tuple[Segment, ...]] = {}

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
                yield Route(number, target.parameter, target.expert_rows, found)
            offset += self.rows[number]

    def all_routes(self, shard: int) -> Iterator[Route]:
        """Those to all ranks of an engine that get something."""
        for receiver in range(self._receivers):
            yield from self.routes(shard, receiver)

    def segments(self, shard: int) -> tuple[Segment, ...]:
        """What a shard sends of one parameter to all ranks of an engine, row by row."""
        if shard not in self._segments:
            crossings = (c for route in self.all_routes(shard) for c in route.crossings)
            self._segments[shard] = segments(crossings, self._map.engine.item_bytes)
        return self._segments[shard]

    def received_elements(self, receiver: int) -> int:
        """Elements of one parameter that an engine rank gets."""
        pieces = [self._map.target(name, receiver).piece for name, _ in self.rule.hf]
        return sum(piece.rows * piece.cols for piece in pieces)

    def columns_of_boxes(self) -> Iterator[tuple[str, int]]:
        """(target, columns that divide offset and width of its boxes), once for each route."""
        for shard in range(self._train.shards(self.rule)):
            for route in self.all_routes(shard):
                cuts = (math.gcd(c.cols, c.target_col) for c in route.crossings)
                yield route.target, math.gcd(*cuts)
