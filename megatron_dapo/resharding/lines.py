"""How the replicas of a shard divide what the shard sends.

All that a shard sends, in the order of the family, is a line of bytes. The line is cut into equal
stripes that go round the replicas, so that all of them have the same to send in total and most of
them have something to send in every bucket. Cuts fall between rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_dapo.resharding.boxes import Crossing

ROWS_PER_STRIPE = 32
"""Least; a stripe ends at a row, so shares differ by up to one row in so many."""
MESSAGE_BYTES = 2**20
"""A stripe is not made so short that its messages are smaller than this."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one parameter that send equally many bytes each."""

    row: int
    rows: int
    row_bytes: int


def segments(crossings: Iterable[Crossing], item_bytes: int) -> tuple[Segment, ...]:
    """What one shard sends of one parameter to all engine ranks, row by row."""
    changes: dict[int, int] = {}
    for crossing in crossings:
        size = crossing.cols * item_bytes
        changes[crossing.row] = changes.get(crossing.row, 0) + size
        stop = crossing.row + crossing.rows
        changes[stop] = changes.get(stop, 0) - size
    rows = sorted(row for row, change in changes.items() if change)
    sizes = accumulate(changes[row] for row in rows)
    return tuple(
        Segment(row, stop - row, size)
        for row, stop, size in zip(rows, rows[1:], sizes, strict=False)
        if size
    )


def bytes_between(parts: Sequence[Segment], start: int, stop: int) -> int:
    """Bytes of the rows [start, stop)."""
    return sum(
        max(0, min(stop, part.row + part.rows) - max(start, part.row)) * part.row_bytes
        for part in parts
    )


def row_at(parts: Sequence[Segment], position: int) -> int:
    """The first row that begins at or after `position` bytes."""
    for part in parts:
        size = part.rows * part.row_bytes
        if position <= size:
            return part.row + -(-position // part.row_bytes)
        position -= size
    raise AssertionError(f"{position} bytes beyond the end of {parts}")


class Line:
    """The bytes of one shard and who sends them.

    Args:
        parameters: numbers of the shard's parameters, ascending.
        parts: what each sends.
        buckets: about how many buckets the line passes through.
        receivers: ranks of an engine.
    """

    def __init__(
        self,
        parameters: Sequence[int],
        parts: Sequence[Sequence[Segment]],
        *,
        replicas: int,
        buckets: int,
        receivers: int,
    ) -> None:
        self.parameters = parameters
        self._parts = parts
        sizes = (sum(part.rows * part.row_bytes for part in each) for each in parts)
        self._starts = list(accumulate(sizes, initial=0))
        self.replicas = replicas
        self.widest_row_bytes = max(
            (part.row_bytes for each in set(parts) for part in each), default=1
        )
        least = max(ROWS_PER_STRIPE * self.widest_row_bytes, MESSAGE_BYTES * receivers)
        rounds = max(1, min(buckets, self.total_bytes // (replicas * least)))
        self._stripes = replicas * rounds

    @property
    def total_bytes(self) -> int:
        return self._starts[-1]

    def owners(self, parameter: int) -> list[tuple[int, int, int]]:
        """(first row, row after the last, replica) of all rows of a parameter that are sent."""
        number = bisect_right(self.parameters, parameter) - 1
        start, stop = self._starts[number], self._starts[number + 1]
        parts = self._parts[number]
        if start == stop:
            return []
        first = start * self._stripes // self.total_bytes
        last = (stop - 1) * self._stripes // self.total_bytes
        end = parts[-1].row + parts[-1].rows
        found, row = [], parts[0].row
        for stripe in range(first, last + 1):
            cut = end
            if stripe < last:
                border = -(-(stripe + 1) * self.total_bytes // self._stripes)
                cut = row_at(parts, border - start)
            if cut > row:
                found.append((row, cut, stripe % self.replicas))
            row = cut
        return found

    def bytes_by_replica(self) -> list[int]:
        """What each replica sends to one engine."""
        sent = [0] * self.replicas
        for number, parameter in enumerate(self.parameters):
            for row, stop, replica in self.owners(parameter):
                sent[replica] += bytes_between(self._parts[number], row, stop)
        return sent
