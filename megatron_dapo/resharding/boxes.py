"""Boxes of matrices. Every tensor of a plan is seen as one: [shape[0], product of the rest]."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Box:
    """Rows [row, row + rows) and columns [col, col + cols) of a matrix; a vector of n is [n, 1]."""

    row: int
    rows: int
    col: int
    cols: int

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class Placement:
    """A box of a Hugging Face tensor, and where it starts in a parameter of one rank.

    Fused experts [experts, x, y] are a matrix of experts * x rows and y columns.
    """

    tensor: str
    part: Box
    parameter: str
    row: int
    col: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stack of Hugging Face tensors, and where it starts in a parameter."""

    row: int
    rows: int
    col: int
    cols: int
    to_row: int
    to_col: int

    def moved_down(self, rows: int) -> Piece:
        """The same piece of a stack in which `rows` rows lie above."""
        return replace(self, row=self.row + rows)


@dataclass(frozen=True, slots=True)
class Crossing:
    """What a source piece and a target piece have in common."""

    row: int
    rows: int
    cols: int
    source_row: int
    source_col: int
    target_row: int
    target_col: int


def cross(source: Piece, target: Piece) -> Crossing | None:
    """The common box of two pieces of one stack, in the coordinates of both; None without one."""
    row, col = max(source.row, target.row), max(source.col, target.col)
    rows = min(source.row + source.rows, target.row + target.rows) - row
    cols = min(source.col + source.cols, target.col + target.cols) - col
    if rows <= 0 or cols <= 0:
        return None
    return Crossing(
        row,
        rows,
        cols,
        source.to_row + row - source.row,
        source.to_col + col - source.col,
        target.to_row + row - target.row,
        target.to_col + col - target.col,
    )
