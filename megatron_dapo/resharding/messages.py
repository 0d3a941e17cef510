"""Messages: the transfers of one bucket from one trainer rank to one engine rank, as flat bytes.

Everything about a message follows from the plan, so it carries numbers only: in the engine's dtype
and in plan order, before them the scales and behind them the values of FP8 matrices. While a sender
packs it digests what it packs: the partial digests of all senders add up to what the engine must
find in its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_dapo.resharding.block_grid import Content
from megatron_dapo.resharding.block_scales import BlockScales
from megatron_dapo.resharding.digest import as_matrix, box_digest
from megatron_dapo.resharding.quantize import E4M3
from megatron_dapo.resharding.transfers import Transfer, filled_up, in_message_order

if TYPE_CHECKING:
    from megatron_dapo.resharding.plan import ReshardPlan


DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""`EngineLayout.dtype` -> of the numbers in messages, but for FP8 matrices."""


def dtype_of(content: Content, plain: torch.dtype) -> torch.dtype:
    """Dtype of a transfer, and of what it is written into.

    Args:
        plain: the engine's.
    """
    return {"plain": plain, "values": E4M3, "scales": torch.float32}[content]


@dataclass(frozen=True)
class Message:
    """What one trainer rank sends to one engine rank (of every replica) of one bucket."""

    bucket: int
    receiver: int
    """Tensor rank of the engine."""
    num_bytes: int
    transfers: tuple[Transfer, ...]


def unpack(
    flat: Tensor, transfers: Iterable[Transfer], dtype: torch.dtype
) -> Iterator[tuple[Transfer, Tensor]]:
    """Each transfer with its numbers [rows, columns]: views of the message, nothing is copied.

    Args:
        flat: uint8, the whole message.
        transfers: of this message, in their order.
        dtype: the engine's.

    Raises:
        RuntimeError: the message is longer or shorter than its transfers.
    """
    offset = 0
    for transfer in transfers:
        box, numbers = transfer.target_box, dtype_of(transfer.content, dtype)
        end = offset + box.elements * numbers.itemsize
        if end > flat.numel():
            raise RuntimeError(
                f"message of bucket {transfer.bucket} from trainer rank {transfer.sender} ends "
                f"after {flat.numel()} bytes, before {transfer.target!r} at {offset}"
            )
        yield transfer, flat[offset:end].view(numbers).view(box.rows, box.cols)
        offset = end
    if flat.numel() not in (offset, filled_up(offset)):
        raise RuntimeError(f"message of {flat.numel()} bytes has transfers for {offset} only")


class Outbox:
    """All messages of one trainer rank, packed when they are due.

    Parameters are read while packing: no optimizer step may run meanwhile, nor between
    `scales.find` and packing. No gradient.

    Args:
        sources: this rank's Megatron parameters under the plan's entry keys, on any device; rounded
            to the engine's dtype, then to e4m3 where it keeps that, while they are packed.
        with_digests: off saves their time; `partial_digests` is then empty.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        sender: int,
        sources: Mapping[str, Tensor],
        *,
        with_digests: bool = True,
    ) -> None:
        self.plan, self.sender, self.sources = plan, sender, sources
        self.dtype = DTYPES[plan.engine.dtype]
        self.scales = BlockScales(plan.block_sources(sender), sources, self.dtype)
        """Must be found before an FP8 message is packed."""
        self._with_digests = with_digests
        self._digests: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def __iter__(self) -> Iterator[Message]:
        """All messages: buckets ascending, in each the engine's tensor ranks ascending."""
        return iter(self._messages)

    @cached_property
    def _messages(self) -> tuple[Message, ...]:
        return tuple(self._walk())

    def _walk(self) -> Iterator[Message]:
        transfers = self.plan.transfers_from(self.sender)
        for bucket, in_bucket in groupby(transfers, key=lambda transfer: transfer.bucket):
            of_receiver: dict[int, list[Transfer]] = defaultdict(list)
            for transfer in in_bucket:
                of_receiver[transfer.receiver].append(transfer)
            for receiver in sorted(of_receiver):
                found = in_message_order(of_receiver[receiver])
                yield Message(bucket, receiver, self.plan.length(found), tuple(found))

    def batches(self, limit: int) -> list[list[Message]]:
        """Runs of messages of one bucket with at most `limit` bytes together (or one message)."""
        buckets = groupby(self, key=lambda message: message.bucket)
        return [batch for _, messages in buckets for batch in fill(messages, limit)]

    def start(self) -> None:
        """Forget the digests of the last version."""
        self._digests.clear()

    def pack(self, message: Message, out: Tensor) -> None:
        """Write the message's bytes.

        Args:
            out: uint8 [message.num_bytes], contiguous, aligned to the dtype, on any device.

        Raises:
            RuntimeError: the plan asks for a parameter that this rank does not hold, or one to be
                sent in FP8 is not finite.
        """
        for transfer, values in unpack(out, message.transfers, self.dtype):
            box = transfer.source_box
            if transfer.source not in self.sources:
                raise RuntimeError(
                    f"trainer rank {self.sender} is planned to send {transfer.source!r}, which it "
                    "does not hold: plan and layout of the training ranks differ"
                )
            if transfer.content == "plain":
                source = as_matrix(self.sources[transfer.source].detach())
                values.copy_(source[box.row : box.row + box.rows, box.col : box.col + box.cols])
            else:
                self.scales.write(transfer, values)
            if self._with_digests:
                self._add_digest(message.receiver, transfer, values)

    def _add_digest(self, receiver: int, transfer: Transfer, values: Tensor) -> None:
        box, target = transfer.target_box, transfer.target
        words = self.plan.word_bytes(target)
        part = box_digest(values, row=box.row, col=box.col, word_bytes=words)
        earlier = self._digests[receiver].get(target)
        self._digests[receiver][target] = part if earlier is None else earlier + part

    def partial_digests(self, receiver: int) -> dict[str, int]:
        """Target of the plan -> this rank's part of its digest (int64), of all packed messages."""
        found = self._digests[receiver]
        values = torch.stack(list(found.values())).tolist() if found else []  # one copy from a GPU
        return dict(zip(found, values, strict=True))


def fill(messages: Iterable[Message], limit: int) -> Iterator[list[Message]]:
    """Runs of messages of at most `limit` bytes together; a larger message stands alone."""
    batch: list[Message] = []
    filled = 0
    for message in messages:
        if batch and filled + message.num_bytes > limit:
            yield batch
            batch, filled = [], 0
        batch.append(message)
        filled += message.num_bytes
    if batch:
        yield batch
