"""Trainer ranks and a transport inside one process."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_dapo.resharding.digest import as_matrix
from megatron_dapo.resharding.messages import Message, Outbox
from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.transport import UpdatePayload
from tests.unit.resharding.layouts import train_placements


def trainer_parameters(
    plan: ReshardPlan, tensors: dict[str, Tensor], rank: int
) -> dict[str, Tensor]:
    """What a trainer rank holds of a model, by `Entry.key`."""
    found = {key: torch.full(shape, 9.0) for key, shape in plan.sources(rank).items()}
    for place in train_placements(plan.family, plan.train, rank):
        box = place.part
        source = as_matrix(tensors[place.tensor])
        part = source[box.row : box.row + box.rows, box.col : box.col + box.cols]
        target = as_matrix(found[place.parameter])
        target[place.row : place.row + box.rows, place.col : place.col + box.cols] = part
    return found


def outboxes_of(plan: ReshardPlan, tensors: dict[str, Tensor]) -> list[Outbox]:
    """All trainer ranks' messages for a model of these Hugging Face tensors."""
    outboxes = [
        Outbox(plan, rank, trainer_parameters(plan, tensors, rank))
        for rank in range(plan.train.world_size)
    ]
    find_scales(outboxes)
    return outboxes


def find_scales(outboxes: list[Outbox]) -> None:
    """The scales of all trainer ranks, with the exchange that their groups make."""
    groups: dict[object, list[Tensor]] = defaultdict(list)
    for outbox in outboxes:
        outbox.scales.measure()
        held = outbox.plan.train.shards_of(outbox.sender)
        for kind, numbers in outbox.scales.shared.items():
            shard, replica = held[kind]
            groups[kind, shard.stage, shard.expert, replica].append(numbers)
    for group in groups.values():
        largest = torch.stack(group).amax(0)
        for numbers in group:
            numbers.copy_(largest)
    for outbox in outboxes:
        outbox.scales.settle()


@dataclass
class InProcess:
    """A transport without a wire: messages are packed when they are asked for."""

    outboxes: list[Outbox]
    tensor_rank: int
    staging_bytes: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    messages: dict[tuple[int, int], tuple[Outbox, Message]] = field(default_factory=dict)

    def begin(self, payload: UpdatePayload) -> None:
        self.messages = {
            (message.bucket, outbox.sender): (outbox, message)
            for outbox in self.outboxes
            for message in outbox
            if message.receiver == self.tensor_rank
        }

    def receive(self, bucket: int, sender: int) -> Tensor:
        self.asked.append((bucket, sender))
        if (bucket, sender) not in self.messages:
            raise RuntimeError(f"bucket {bucket} of trainer rank {sender} is missing")
        outbox, message = self.messages.pop((bucket, sender))
        flat = torch.empty(message.num_bytes, dtype=torch.uint8)
        outbox.pack(message, flat)
        self.staging_bytes = max(self.staging_bytes, flat.nbytes)
        return flat

    def end(self) -> None:
        self.messages = {}

    def close(self) -> None:
        self.messages = {}
