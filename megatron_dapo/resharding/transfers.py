"""Transfers: what a plan consists of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megatron_dapo.resharding.block_grid import SCALE_BYTES, SCALE_SUFFIX, Content, scales_box
from megatron_dapo.resharding.boxes import Box

ORDER: tuple[Content, ...] = ("scales", "plain", "values")
"""In a message: wider numbers first, so that each is aligned."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box, from one trainer rank to one engine rank."""

    tensor: str
    """The Hugging Face tensor that it is part of; for messages."""
    sender: int
    """Global trainer rank."""
    receiver: int
    """Engine rank."""
    source: str
    """`Entry.key` of the sender's parameter."""
    source_box: Box
    """Of scales: which blocks of the stack of the parameter's tensors."""
    target: str
    """Name of the receiver's parameter."""
    target_box: Box
    bucket: int
    content: Content = "plain"


def with_scales(values: Transfer, stack_row: int, stack_col: int) -> Iterator[Transfer]:
    """Values of an FP8 matrix, followed by the scales of the blocks that begin in their box.

    Args:
        stack_row, stack_col: where the box starts in the stack of the parameter's tensors.
    """
    yield values
    box = values.target_box
    blocks = scales_box(Box(stack_row, box.rows, stack_col, box.cols))
    if blocks.elements:
        yield replace(
            values,
            source_box=blocks,
            target=values.target + SCALE_SUFFIX,
            target_box=scales_box(box),
            content="scales",
        )


def in_message_order(transfers: Iterable[Transfer]) -> list[Transfer]:
    """The transfers of one message, as their bytes follow each other."""
    return sorted(transfers, key=lambda transfer: ORDER.index(transfer.content))


def filled_up(size: int) -> int:
    """Length of an FP8 message: the next one is aligned for the widest numbers."""
    return size + -size % SCALE_BYTES
