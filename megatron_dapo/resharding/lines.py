"""How the replicas of a shard divide what the shard sends.

All that a shard sends, in the order of the family, is a line of bytes. The line is cut into equal
stripes that go round the replicas, so that all of them have the same to send in total and most of
them have something to send in every bucket. Cuts fall between rows; of FP8 matrices, between rows
of blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_dapo.resharding.block_grid import BLOCK, SCALE_BYTES, begin_in
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
    """Of its own numbers."""
    scale_bytes: int = 0
    """That a row which begins blocks sends beside them."""
    step: int = 1
    """Rows that stay together: cuts fall on multiples of it."""

    def bytes_to(self, stop: int) -> int:
        """Of the rows before `stop`, a row of the segment or its end."""
        _, blocks = begin_in(self.row, stop - self.row)
        return (stop - self.row) * self.row_bytes + blocks * self.scale_bytes

    @property
    def num_bytes(self) -> int:
        return self.bytes_to(self.row + self.rows)

    @property
    def step_bytes(self) -> int:
        """Of the rows that no cut parts."""
        return self.row_bytes * self.step + self.scale_bytes

    def row_at(self, position: int) -> int:
        """The first row at which it may be cut, and before which are `position` bytes or more."""
        end = self.row + self.rows
        first = min(-(-self.row // self.step) * self.step, end)
        left = max(0, position - self.bytes_to(first))
        return min(first + -(-left // self.step_bytes) * self.step, end)


def segments(
    crossings: Iterable[Crossing], item_bytes: int, *, in_blocks: bool = False
) -> tuple[Segment, ...]:
    """What one shard sends of one parameter to all engine ranks, row by row.

    Args:
        in_blocks: the crossings are of an FP8 matrix: scales go with them.
    """
    changes: dict[int, tuple[int, int]] = {}
    for crossing in crossings:
        _, blocks = begin_in(crossing.target_col, crossing.cols) if in_blocks else (0, 0)
        size, scales = crossing.cols * item_bytes, blocks * SCALE_BYTES
        for row, sign in ((crossing.row, 1), (crossing.row + crossing.rows, -1)):
            before = changes.get(row, (0, 0))
            changes[row] = (before[0] + sign * size, before[1] + sign * scales)
    rows = sorted(row for row, change in changes.items() if any(change))
    sizes = accumulate((changes[row] for row in rows), lambda a, b: (a[0] + b[0], a[1] + b[1]))
    return tuple(
        Segment(row, stop - row, size, scales, BLOCK if in_blocks else 1)
        for row, stop, (size, scales) in zip(rows, rows[1:], sizes, strict=False)
        if size
    )


def bytes_between(parts: Sequence[Segment], start: int, stop: int) -> int:
    """Bytes of the rows [start, stop)."""
    total = 0
    for part in parts:
        low = max(start, part.row)
        high = min(stop, part.row + part.rows)
        if low < high:
            total += part.bytes_to(high) - part.bytes_to(low)
    return total


def row_at(parts: Sequence[Segment], position: int) -> int:
    """The first row that may begin a stripe at or after `position` bytes."""
    for part in parts:
        if position <= part.num_bytes:
            return part.row_at(position)
        position -= part.num_bytes
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
        sizes = (sum(part.num_bytes for part in each) for each in parts)
        self._starts = list(accumulate(sizes, initial=0))
        self.replicas = replicas
        self.widest_row_bytes = max(
            (part.step_bytes for each in set(parts) for part in each), default=1
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
