"""Where the scales of FP8 matrices lie: arithmetic of blocks, for both sides of a plan.

An engine in FP8 keeps the matrices of the layers as e4m3 *values*, and one fp32 *scale* for each
128 x 128 block. Tensors of one parameter are stacked, and every engine rank's part of each is
cut at whole blocks (vLLM refuses others). Rows and columns of a stack, of a Hugging Face tensor and
of an engine parameter therefore count blocks alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_dapo.resharding.boxes import Box, Piece
from megatron_dapo.resharding.train_map import ShardKind

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
"""What the name of a matrix's scales ends in."""
SCALE_BYTES = 4
Content = Literal["plain", "values", "scales"]
"""What a box of numbers is: in the engine's dtype, e4m3, or what blocks are multiplied by."""


def begin_in(start: int, count: int) -> tuple[int, int]:
    """(the first, how many) of the blocks whose first row, or column, is in [start, start + count).

    Of boxes that tile a matrix, in whatever way, exactly one begins each block.
    """
    first = -(-start // BLOCK)
    return first, -(-(start + count) // BLOCK) - first


def reached_by(start: int, count: int) -> range:
    """Blocks with a row, or column, in [start, start + count)."""
    return range(start // BLOCK, -(-(start + count) // BLOCK))


def scales_box(box: Box) -> Box:
    """Blocks that begin in a box, as a box of the matrix of scales; it may be empty."""
    return Box(*begin_in(box.row, box.rows), *begin_in(box.col, box.cols))


def scales_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Blocks down and across a matrix [..., rows, columns]; those at the edges may be cut short."""
    *before, rows, cols = shape
    return *before, -(-rows // BLOCK), -(-cols // BLOCK)


def blocks_on_several(shards: Iterable[Sequence[Piece]]) -> int:
    """Blocks of a stack that more than one shard holds a part of."""
    holders: Counter[tuple[int, int]] = Counter()
    for pieces in shards:
        held = {
            (down, across)
            for piece in pieces
            for down in reached_by(piece.row, piece.rows)
            for across in reached_by(piece.col, piece.cols)
        }
        holders.update(held)
    return sum(count > 1 for count in holders.values())


@dataclass(frozen=True)
class BlockSource:
    """A trainer rank's part of a stack of matrices that the engines keep in FP8."""

    pieces: tuple[Piece, ...]
    """What it holds, in the order of its rows."""
    blocks: tuple[int, int]
    """Down and across the whole stack."""
    kind: ShardKind
    """Of its shard."""
    shared: bool
    """Some block lies on several ranks that hold such shards."""

    def place(self, box: Box) -> tuple[int, int]:
        """(row, column) of the stack at which a box of the rank's parameter starts."""
        for piece in self.pieces:
            if piece.to_row <= box.row < piece.to_row + piece.rows:
                return piece.row + box.row - piece.to_row, piece.col + box.col - piece.to_col
        raise AssertionError(f"{box} is in none of {self.pieces}")
