"""Which rank sits where and does what, in Megatron's order of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_dapo.config.schema import ParallelConfig


@dataclass(frozen=True)
class RankPlace:
    """Place of one trainer rank on the machines and in every parallel dimension."""

    rank: int
    node: int
    device: int
    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int


def rank_map(parallel: ParallelConfig) -> list[RankPlace]:
    """Place of every rank, [world_size].

    Tensor ranks are neighbours, then context, then data, and pipeline stages are furthest apart
    (Megatron's order tp-cp-ep-dp-pp); expert ranks are cut out of tensor x context x data.
    """
    per_node = parallel.world_size // parallel.nodes
    return [_place(rank, per_node, parallel) for rank in range(parallel.world_size)]


def _place(rank: int, per_node: int, parallel: ParallelConfig) -> RankPlace:
    rest, tensor = divmod(rank, parallel.tensor)
    rest, context = divmod(rest, parallel.context)
    pipeline, data = divmod(rest, parallel.data)
    inside_stage = rank % (parallel.tensor * parallel.context * parallel.data)
    return RankPlace(
        rank=rank,
        node=rank // per_node,
        device=rank % per_node,
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
        expert=inside_stage // parallel.expert_tensor_size % parallel.expert,
    )


def as_ranges(numbers: Iterable[int]) -> str:
    """Sorted distinct numbers in short form: 0-7, 12."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
