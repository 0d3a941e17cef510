"""A trainer rank's matrices in FP8: the scales of all blocks first, then values box by box.

The scale of a block follows from its largest absolute value. Where trainer shards are not cut at
multiples of 128, a block lies on several ranks: each finds the largest value of its part, and
the ranks that hold the same layers (one tensor or expert-tensor group) exchange the maxima. After
that every rank makes its values alone, exactly as if it held the whole matrix. The numbers
exchanged are 4 bytes for each 32 KiB of a matrix, and only of matrices with such blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.resharding.block_grid import BlockSource
from megatron_dapo.resharding.digest import as_matrix
from megatron_dapo.resharding.quantize import divide, raise_peaks, scales_of
from megatron_dapo.resharding.train_map import ShardKind
from megatron_dapo.resharding.transfers import Transfer

if TYPE_CHECKING:
    from megatron_dapo.parallel.context import ParallelContext

ShareMaxima = Callable[[ShardKind, Tensor], None]
"""Replaces each number by its maximum over the ranks that hold other shards of these parameters.
Collective over the tensor group (`tensor`) or the expert-tensor group (`expert`)."""


def maxima_over(parallel: ParallelContext) -> ShareMaxima:
    """The exchange between the ranks of a run."""

    def share(kind: ShardKind, numbers: Tensor) -> None:
        group = parallel.etp_group if kind == "expert" else parallel.tp_group
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)

    return share


class BlockScales:
    """Scales of everything that one trainer rank sends in FP8. No gradient.

    Args:
        parts: by `Entry.key`, of `plan.block_sources`; in the same order on every rank.
        sources: this rank's Megatron parameters under these keys and others.
        dtype: that parameters are rounded to before they become values.
    """

    def __init__(
        self, parts: Mapping[str, BlockSource], sources: Mapping[str, Tensor], dtype: torch.dtype
    ) -> None:
        # Those whose maxima are exchanged lie together, so that it takes one exchange a kind.
        self._parts = dict(sorted(parts.items(), key=lambda item: _exchange_order(item[1])))
        self._sources, self._dtype = sources, dtype
        self._numbers = torch.empty(0)
        """Of all blocks: largest absolute values, then scales."""
        self._grids: dict[str, Tensor] = {}
        """Its part of these numbers, [blocks down, blocks across], of each parameter."""
        self.unfit: str | None = None
        """Key of a parameter that holds an infinity or NaN, where `measure` found one."""

    def measure(self) -> None:
        """Find the largest absolute value of each block in what this rank holds. Local."""
        sizes = [math.prod(part.blocks) for part in self._parts.values()]
        device = next((self._sources[key].device for key in self._parts), torch.device("cpu"))
        self._numbers = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        runs = self._numbers.split(sizes)
        self._grids = {
            key: run.view(part.blocks)
            for (key, part), run in zip(self._parts.items(), runs, strict=True)
        }
        for key, part in self._parts.items():
            source = as_matrix(self._sources[key].detach())
            for piece in part.pieces:
                raise_peaks(
                    self._grids[key],
                    source[piece.to_row : piece.to_row + piece.rows, piece.to_col :][
                        :, : piece.cols
                    ],
                    row=piece.row,
                    col=piece.col,
                    dtype=self._dtype,
                )
        self.unfit = None
        if not bool(torch.isfinite(self._numbers).all()):
            grids = self._grids.items()
            self.unfit = next(key for key, grid in grids if not torch.isfinite(grid).all())

    @property
    def shared(self) -> dict[ShardKind, Tensor]:
        """Views of the numbers that ranks must exchange between `measure` and `settle`."""
        found: dict[ShardKind, Tensor] = {}
        start = 0
        for part in self._parts.values():
            if not part.shared:
                break
            stop = start + math.prod(part.blocks)
            earlier = found.get(part.kind)
            first = start if earlier is None else start - earlier.numel()
            found[part.kind] = self._numbers[first:stop]
            start = stop
        return found

    def settle(self) -> None:
        """Every block's largest value is known: from now on they are scales. Local."""
        self._numbers.copy_(scales_of(self._numbers))

    def find(self, share: ShareMaxima) -> None:
        """`measure`, exchange and `settle`. Collective where blocks lie on several ranks."""
        self.measure()
        for kind, numbers in self.shared.items():
            share(kind, numbers)
        self.settle()

    def check(self) -> None:
        """Refuse what no scale covers. Local, after `measure`.

        Raises:
            RuntimeError: a parameter of this rank holds an infinity or NaN; the message names it.
        """
        if self.unfit is not None:
            raise RuntimeError(
                f"{self.unfit!r} holds an infinity or NaN, which no scale of FP8 covers: the "
                "training has diverged. Go back to a checkpoint before it did"
            )

    def write(self, transfer: Transfer, out: Tensor) -> None:
        """What a transfer brings; after `find`.

        Args:
            out: [rows, cols] of its target box; e4m3 for values, fp32 for scales.

        Raises:
            RuntimeError: a parameter of this rank holds an infinity or NaN.
        """
        self.check()
        key, box = transfer.source, transfer.source_box
        assert key in self._grids, f"scales of {key!r} are asked for before they are found"
        rows, cols = slice(box.row, box.row + box.rows), slice(box.col, box.col + box.cols)
        if transfer.content == "scales":
            out.copy_(self._grids[key][rows, cols])
            return
        row, col = self._parts[key].place(box)
        source = as_matrix(self._sources[key].detach())[rows, cols]
        divide(source, self._grids[key], out=out, row=row, col=col, dtype=self._dtype)


def _exchange_order(part: BlockSource) -> tuple[bool, str]:
    return not part.shared, part.kind
