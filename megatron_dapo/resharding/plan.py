"""The static plan of a weight update: who sends which box of which tensor to whom, and where it
lands.

Trainer and engine compute the same plan from the same few numbers (two layouts, one model shape,
one bucket size), so only weights travel. Nothing is stored for each rank and tensor: transfers
are enumerated when asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property

from megatron_dapo.resharding import lines
from megatron_dapo.resharding.block_grid import BlockSource, Content
from megatron_dapo.resharding.boxes import Box
from megatron_dapo.resharding.buckets import Buckets
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.engine_map import EngineMap
from megatron_dapo.resharding.lines import Line
from megatron_dapo.resharding.name_map import Entry, Family
from megatron_dapo.resharding.routes import Kind
from megatron_dapo.resharding.train_map import (
    Held,
    Shard,
    ShardKind,
    TrainLayout,
    check_divides,
    experts_per_rank,
    source_shape,
)
from megatron_dapo.resharding.transfers import Transfer, filled_up, in_message_order, with_scales

PLAN_FORMAT = 2
"""Raised when the same inputs no longer give the same plan."""
LONGEST_WORD = 8


class ReshardPlan:
    """Every transfer of one weight update, in a fixed order: bucket, then parameter.

    Engine ranks are numbered over all replicas; each replica gets the same bytes from the same
    senders.
    """

    def __init__(
        self, train: TrainLayout, engine: EngineLayout, family: Family, *, bucket_bytes: int
    ) -> None:
        check_divides(train, family)
        if bucket_bytes < 1:
            raise ValueError(f"a bucket of {bucket_bytes} bytes holds nothing; must be positive")
        self.train, self.engine, self.family = train, engine, family
        self.bucket_bytes = bucket_bytes
        self.map = EngineMap(family, engine)
        self._experts_per_rank = experts_per_rank(family.num_experts, train.expert)
        kinds = {rule: Kind(rule, family, train, self.map) for rule in family.rules}
        self.entries = [entry for entry in family.entries if entry.rule.exported]
        self._kinds = [kinds[entry.rule] for entry in self.entries]
        self._stages = [train.stage_of(entry, family) for entry in self.entries]
        self._buckets = Buckets(
            [kind.total_rows for kind in self._kinds],
            [kind.step for kind in self._kinds],
            [kind.step_bytes for kind in self._kinds],
            bucket_bytes,
        )
        self._lines: dict[Shard, Line] = {}

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    @property
    def largest_bucket_bytes(self) -> int:
        """Most bytes under way in a bucket; more than asked for where one row, or one row of
        blocks, is longer. A rank's part of a bucket is never larger."""
        return self._buckets.largest_bytes

    def entries_of(self, bucket: int) -> list[Entry]:
        """Parameters that a bucket brings rows of."""
        return [self.entries[number] for number, _, _ in self._buckets.runs(bucket)]

    def transfers_from(self, sender: int) -> Iterator[Transfer]:
        """Everything that a trainer rank sends to the first replica of the engines."""
        for bucket in range(self.num_buckets):
            yield from self._walk(bucket, range(self.engine.tensor), sender)

    def transfers_to(self, receiver: int) -> Iterator[Transfer]:
        """Everything that an engine rank receives."""
        for bucket in range(self.num_buckets):
            yield from self._walk(bucket, (receiver,), None)

    def message(self, bucket: int, sender: int, receiver: int) -> list[Transfer]:
        """What one trainer rank sends to one engine rank in a bucket, in the order of its bytes."""
        return in_message_order(self._walk(bucket, (receiver,), sender))

    def message_bytes(self, bucket: int, sender: int, receiver: int) -> int:
        """Length of a message; 0: there is none."""
        return self.length(self._walk(bucket, (receiver,), sender))

    def message_sizes(self, bucket: int, receiver: int) -> dict[int, int]:
        """Trainer rank -> length of its message to an engine rank in a bucket, ascending."""
        found: dict[int, list[Transfer]] = {}
        for transfer in self._walk(bucket, (receiver,), None):
            found.setdefault(transfer.sender, []).append(transfer)
        return {sender: self.length(found[sender]) for sender in sorted(found)}

    def length(self, transfers: Iterable[Transfer]) -> int:
        """Bytes of a message of these transfers."""
        engine = self.engine
        size = sum(t.target_box.elements * engine.bytes_of(t.content) for t in transfers)
        return size if engine.quantization is None else filled_up(size)

    def senders_of(self, bucket: int, receiver: int) -> tuple[int, ...]:
        """Trainer ranks that send to an engine rank in a bucket, ascending."""
        return tuple(self.message_sizes(bucket, receiver))

    def parameters(self, receiver: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every engine parameter that is written, in family order."""
        return self.map.parameters(receiver % self.engine.tensor)

    def padding(self, receiver: int) -> list[tuple[str, Box]]:
        """Boxes of those parameters that no transfer writes; they must hold zeros."""
        return self.map.padding(receiver % self.engine.tensor)

    def sources(self, sender: int) -> dict[str, tuple[int, ...]]:
        """`Entry.key` -> shape of every exported parameter that a trainer rank holds."""
        shards = self.train.shards_of(sender)
        return {
            entry.key: source_shape(entry, self.family, self.train)
            for number, entry in enumerate(self.entries)
            if self._holds(number, shards)
        }

    def block_sources(self, sender: int) -> dict[str, BlockSource]:
        """`Entry.key` -> its blocks, of every parameter that a trainer rank sends in FP8."""
        shards = self.train.shards_of(sender)
        return {
            entry.key: kind.block_source(shards[kind.shard_kind][0].index)
            for number, (entry, kind) in enumerate(zip(self.entries, self._kinds, strict=True))
            if kind.in_blocks and self._holds(number, shards)
        }

    @property
    def blocks(self) -> int:
        """Blocks of all FP8 matrices of the model."""
        return sum(math.prod(kind.blocks) for kind in self._kinds)

    @property
    def shared_blocks(self) -> int:
        """Those that lie on several trainer ranks, whose largest value no rank knows alone."""
        return sum(kind.shared_blocks for kind in self._kinds)

    @cached_property
    def _targets(self) -> dict[str, tuple[Content, int]]:
        """Name of a target ({layer} and {expert} open) -> content, longest word no box cuts."""
        found: dict[str, tuple[Content, int]] = {}
        for kind in dict.fromkeys(self._kinds):
            for target, content, size in kind.bytes_of_boxes():
                _, earlier = found.get(target, (content, LONGEST_WORD))
                found[target] = content, math.gcd(earlier, size)
        return found

    def content(self, target: str) -> Content:
        """What the numbers of a target are.

        Raises:
            ValueError: the plan writes no such parameter.
        """
        name = _open_numbers(target)
        if name not in self._targets:
            raise ValueError(f"the plan writes no {target!r}; it writes {sorted(self._targets)}")
        return self._targets[name][0]

    def word_bytes(self, target: str) -> int:
        """Largest power of two, at most 8, that divides offset and width of all boxes of a target.

        Raises:
            ValueError: the plan writes no such parameter.
        """
        self.content(target)
        return self._targets[_open_numbers(target)][1]

    @cached_property
    def fingerprint(self) -> str:
        """64 bits of a hash of all that the plan follows from, in hexadecimal."""
        inputs = {
            "format": PLAN_FORMAT,
            "train": asdict(self.train),
            "engine": asdict(self.engine),
            "model_type": self.family.model_type,
            "kv_groups": self.family.kv_groups,
            "tensors": self.family.hf_tensors,
            "targets": self.parameters(0),
            "bucket_bytes": self.bucket_bytes,
            "stripes": (lines.ROWS_PER_STRIPE, lines.MESSAGE_BYTES),
        }
        text = json.dumps(inputs, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def bytes_by_sender(self) -> dict[int, int]:
        """Trainer rank -> bytes that it sends to all replicas of the engines together."""
        sent = dict.fromkeys(range(self.train.world_size), 0)
        for shard, shares in self.bytes_by_replica():
            for replica, count in enumerate(shares):
                sent[self.train.rank(shard, replica)] += count * self.engine.replicas
        return sent

    def bytes_by_replica(self) -> Iterator[tuple[Shard, list[int]]]:
        """Of every shard, the bytes that each of its holders sends to one engine replica."""
        return ((shard, self._line(shard).bytes_by_replica()) for shard in self._shards())

    def widest_row_bytes(self, shard: Shard) -> int:
        """Bytes of the longest row that a shard sends: shares are equal but for a row or two."""
        return self._line(shard).widest_row_bytes

    def bytes_by_receiver(self) -> dict[int, int]:
        """Engine rank -> bytes that it receives."""
        tensor = self.engine.tensor
        received = [self._received(rank) for rank in range(tensor)]
        return {rank: received[rank % tensor] for rank in range(self.engine.world_size)}

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes that reach all engines together."""
        return sum(self.bytes_by_receiver().values())

    @cached_property
    def lower_bound(self) -> int:
        """Bytes that the engines own: their parameters without padding."""
        owned = sum(self.map.owned_bytes(rank) for rank in range(self.engine.tensor))
        return owned * self.engine.replicas

    def _received(self, receiver: int) -> int:
        parameters = Counter(
            kind
            for entry, kind in zip(self.entries, self._kinds, strict=True)
            if self.map.local_expert(entry.expert, receiver) is not None
        )
        return sum(count * kind.received_bytes(receiver) for kind, count in parameters.items())

    def _walk(
        self, bucket: int, receivers: Iterable[int], sender: int | None
    ) -> Iterator[Transfer]:
        """Transfers of a bucket to some receivers, from one sender or all."""
        held = None if sender is None else self.train.shards_of(sender)
        for number, first, end in self._buckets.runs(bucket):
            if held is not None and not self._holds(number, held):
                continue
            for shard in self._shards_of(number, held):
                owners = self._owners(number, shard, first, end, sender)
                if owners:
                    for receiver in receivers:
                        yield from self._deliver(bucket, number, shard, receiver, owners)

    def _owners(
        self, number: int, shard: Shard, first: int, end: int, sender: int | None
    ) -> list[tuple[int, int, int]]:
        """(first row, row after the last, sender) of some rows of a shard of a parameter."""
        found = []
        for row, stop, replica in self._line(shard).owners(number):
            low, high = max(row, first), min(stop, end)
            if low < high:
                rank = self.train.rank(shard, replica)
                if sender is None or rank == sender:
                    found.append((low, high, rank))
        return found

    def _deliver(
        self,
        bucket: int,
        number: int,
        shard: Shard,
        receiver: int,
        owners: list[tuple[int, int, int]],
    ) -> Iterator[Transfer]:
        entry, tensor_rank = self.entries[number], receiver % self.engine.tensor
        local, kind = self.map.local_expert(entry.expert, tensor_rank), self._kinds[number]
        if local is None:
            return
        for route in kind.routes(shard.index, tensor_rank):
            tensor = entry.hf[route.tensor].name
            target = route.target.format(layer=entry.layer, expert=entry.expert)
            below = local * route.expert_rows
            for crossing in route.crossings:
                for low, high, rank in owners:
                    row = max(crossing.row, low)
                    rows = min(crossing.row + crossing.rows, high) - row
                    if rows <= 0:
                        continue
                    source_row = crossing.source_row + row - crossing.row
                    target_row = crossing.target_row + row - crossing.row + below
                    found = Transfer(
                        tensor,
                        rank,
                        receiver,
                        entry.key,
                        Box(source_row, rows, crossing.source_col, crossing.cols),
                        target,
                        Box(target_row, rows, crossing.target_col, crossing.cols),
                        bucket,
                        kind.content,
                    )
                    if kind.in_blocks:
                        yield from with_scales(found, row, route.first_col + crossing.target_col)
                    else:
                        yield found

    def _shards_of(self, number: int, held: Mapping[ShardKind, Held] | None) -> list[Shard]:
        """Shards of a parameter: all, or the one that a rank holds."""
        kind, entry = self._kinds[number], self.entries[number]
        if held is not None:
            return [held[kind.shard_kind][0]]
        expert = 0 if entry.expert is None else entry.expert // self._experts_per_rank
        return [
            Shard(kind.shard_kind, self._stages[number], expert, index)
            for index in range(self.train.shards(kind.rule))
        ]

    def _holds(self, number: int, held: Mapping[ShardKind, Held]) -> bool:
        """Whether a rank with these shards has its part of a parameter."""
        expert = self.entries[number].expert
        shard = held["expert"][0]
        mine = expert is None or expert // self._experts_per_rank == shard.expert
        return mine and self._stages[number] == shard.stage

    def _line(self, shard: Shard) -> Line:
        """What a shard sends; made on first use."""
        if shard not in self._lines:
            numbers = self._parameters_of[shard.kind, shard.stage, shard.expert]
            full = self._stage_bytes[shard.stage]
            self._lines[shard] = Line(
                numbers,
                [self._kinds[number].segments(shard.index) for number in numbers],
                replicas=self.train.replicas(shard),
                buckets=-(-full // self.bucket_bytes),
                receivers=self.engine.tensor,
            )
        return self._lines[shard]

    @cached_property
    def _parameters_of(self) -> dict[tuple[ShardKind, int, int], list[int]]:
        """(kind, stage, expert rank) -> numbers of the parameters in such shards, ascending."""
        found: dict[tuple[ShardKind, int, int], list[int]] = {}
        for number in range(len(self.entries)):
            shard = self._shards_of(number, None)[0]
            found.setdefault((shard.kind, shard.stage, shard.expert), []).append(number)
        return found

    @cached_property
    def _stage_bytes(self) -> Counter[int]:
        """Pipeline stage -> bytes of all its Hugging Face tensors."""
        found: Counter[int] = Counter()
        for stage, kind in zip(self._stages, self._kinds, strict=True):
            found[stage] += kind.total_rows // kind.step * kind.step_bytes
        return found

    def _shards(self) -> Iterator[Shard]:
        """Every shard that sends something."""
        counts = {
            "whole": 1,
            "tensor": self.train.tensor,
            "expert": self.train.expert_tensor,
        }
        for kind, stage, expert in self._parameters_of:
            for index in range(counts[kind]):
                yield Shard(kind, stage, expert, index)


def build_plan(
    train: TrainLayout, engine: EngineLayout, family: Family, *, bucket_bytes: int
) -> ReshardPlan:
    """The plan of a weight update; the same on every trainer and engine rank.

    Args:
        bucket_bytes: full tensors of one bucket together, as the engine keeps them. One row, or
            one row of FP8 blocks, goes into a bucket however long it is (`largest_bucket_bytes`).

    Raises:
        ValueError: the model cannot be cut over one of the layouts; the message names the size.
    """
    return ReshardPlan(train, engine, family, bucket_bytes=bucket_bytes)


def _open_numbers(target: str) -> str:
    opened = re.sub(r"layers\.\d+", "layers.{layer}", target)
    return re.sub(r"experts\.\d+", "experts.{expert}", opened)
