"""The one ledger of divisors: what a token weighs and what an update is divided by.

loss of an update = sum(weights * token losses) / sum(denominators), both sums over data-parallel
ranks, context ranks and micro-batches. Megatron forms the quotient once, so how an update is cut
never changes it.

    aggregation        weight of a token                   denominator of the update
    token_mean         1                                   counted tokens (DAPO Eq. 12)
    sequence_mean      1 / counted tokens of its response  responses with a counted token
    group_token_mean   1 / counted tokens of its group     groups with one (DAPO Eq. 8 as printed)
    constant           1 / constant_tokens                 all responses (Dr.GRPO)

Counted tokens are those of `loss_mask`, before any mismatch correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config.schema import LossConfig


class Pack(Protocol):
    """What the ledger reads of a `types.MicroBatch`."""

    @property
    def loss_mask(self) -> Tensor: ...  # [tokens] bool
    @property
    def sequence_index(self) -> Tensor: ...  # [tokens] int64
    @property
    def group_index(self) -> Tensor: ...  # [tokens] int64
    @property
    def rows(self) -> Tensor: ...  # [num_sequences] int64, unique in the update
    @property
    def num_sequences(self) -> int: ...


@dataclass(frozen=True)
class Ledger:
    """Token weights and denominators of one update; build it with `from_micro_batches`."""

    config: LossConfig
    counted_tokens: int
    """Tokens that train, over all ranks and micro-batches."""
    tokens_of_row: Tensor
    """[rows] int64, counted tokens of each response that this rank holds: of all its context ranks
    together under sequence_mean, which alone reads them, else of this context rank."""
    tokens_of_group: Tensor
    """[groups] int64, over all ranks; empty unless aggregation is group_token_mean."""
    first_row: int
    """Smallest row of the update: its micro-batch declares the groups."""
    counts_sequences: bool
    """True on one context rank: a response that is split over several counts there."""

    @classmethod
    def from_micro_batches(
        cls,
        micro_batches: Sequence[Pack],
        config: LossConfig,
        *,
        dp_cp_group: dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
    ) -> Ledger:
        """The ledger of one update.

        Every rank of `dp_cp_group` calls, with the micro-batches that it will train on, already
        split over context ranks. Communicates int64: one sum over `dp_cp_group`, one over
        `cp_group` for sequence_mean, one maximum over `dp_cp_group` for group_token_mean.

        Raises:
            ValueError: no micro-batch, or aggregation = constant without constant_tokens.
        """
        if not micro_batches:
            raise ValueError("micro_batches is empty: an update has at least one, be it padding")
        if config.aggregation == "constant" and config.constant_tokens is None:
            raise ValueError(
                "loss.constant_tokens is not set: aggregation = constant divides each response "
                "by it; Dr.GRPO takes rollout.max_response_tokens"
            )
        tokens_of_row = _tokens_of_rows(micro_batches)
        if config.aggregation == "sequence_mean":
            _all_reduce(tokens_of_row, dist.ReduceOp.SUM, cp_group)
        by_group = config.aggregation == "group_token_mean"
        first_row, groups = _extent(micro_batches, dp_cp_group) if by_group else (0, 0)
        sums = torch.zeros(1 + groups, dtype=torch.int64, device=tokens_of_row.device)
        for pack in micro_batches:
            sums[0] += pack.loss_mask.sum()
            if by_group:
                sums[1:].index_add_(0, pack.group_index, pack.loss_mask.long())
        _all_reduce(sums, dist.ReduceOp.SUM, dp_cp_group)
        return cls(
            config=config,
            counted_tokens=int(sums[0]),
            tokens_of_row=tokens_of_row,
            tokens_of_group=sums[1:],
            first_row=first_row,
            counts_sequences=cp_group is None or dist.get_rank(cp_group) == 0,
        )

    @property
    def empty(self) -> bool:
        """No token of the update trains: skip the optimizer step, there is nothing to divide."""
        return self.counted_tokens == 0

    def token_weights(self, pack: Pack) -> Tensor:
        """Weight of each token's loss, [tokens] float64; 0 where `loss_mask` is False.

        float64, since a rounded 1/3 is a relative error of 3e-8 in everything that it weighs.
        """
        mask = pack.loss_mask
        if self.config.aggregation == "token_mean":
            return mask.double()
        if self.config.aggregation == "constant":
            assert self.config.constant_tokens is not None, "checked when the ledger was built"
            return mask.double() / self.config.constant_tokens
        if self.config.aggregation == "group_token_mean":
            tokens = self.tokens_of_group[pack.group_index]
        elif pack.num_sequences == 0:
            return mask.double()
        else:
            tokens = self.tokens_of_row[pack.rows][pack.sequence_index]
        return torch.where(mask, 1.0 / tokens.clamp(min=1).double(), 0.0)

    def denominator(self, pack: Pack) -> Tensor:
        """This micro-batch's part of the update's denominator, int64 scalar."""
        if self.config.aggregation == "token_mean":
            return pack.loss_mask.sum()
        nothing = pack.loss_mask.new_zeros((), dtype=torch.int64)
        if not self.counts_sequences:
            return nothing
        if self.config.aggregation == "constant":
            return nothing + pack.num_sequences
        if self.config.aggregation == "sequence_mean":
            return (self.tokens_of_row[pack.rows] > 0).sum()
        # A group may lie in several micro-batches and ranks, so one place declares them all.
        groups = (self.tokens_of_group > 0).sum()
        return torch.where((pack.rows == self.first_row).any(), groups, nothing)


def _tokens_of_rows(micro_batches: Sequence[Pack]) -> Tensor:
    """Counted tokens of each row on this rank, [largest row + 1] int64."""
    largest = max((int(p.rows.max()) for p in micro_batches if p.num_sequences), default=-1)
    device = micro_batches[0].loss_mask.device
    tokens = torch.zeros(largest + 1, dtype=torch.int64, device=device)
    for pack in micro_batches:
        if pack.num_sequences:
            tokens.index_add_(0, pack.rows[pack.sequence_index], pack.loss_mask.long())
    return tokens


def _extent(micro_batches: Sequence[Pack], group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Smallest row and number of group ids of the update, over all ranks of `group`."""
    filled = [pack for pack in micro_batches if pack.num_sequences]
    smallest = min((int(pack.rows.min()) for pack in filled), default=torch.iinfo(torch.int64).max)
    filled = [pack for pack in filled if pack.group_index.numel()]
    groups = max((int(pack.group_index.max()) + 1 for pack in filled), default=1)
    device = micro_batches[0].loss_mask.device
    extent = torch.tensor([-smallest, groups], dtype=torch.int64, device=device)
    _all_reduce(extent, dist.ReduceOp.MAX, group)
    return -int(extent[0]), int(extent[1])


def _all_reduce(
    tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
