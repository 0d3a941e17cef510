"""Which rank sits where and does what, in Megatron's order of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_dapo.config.schema import ParallelConfig


@dataclass(frozen=True)
class Coordinates:
    """A rank's index in every parallel dimension."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int


def coordinates(
    rank: int, *, tensor: int, context: int, data: int, expert: int, expert_tensor: int
) -> Coordinates:
    """Place of `rank` in a grid of these sizes.

    Tensor ranks are neighbours, then context, then data, and pipeline stages are furthest apart
    (Megatron's order tp-cp-ep-dp-pp); expert ranks are cut out of tensor x context x data, where
    the tensor ranks of an expert are neighbours.
    """
    rest, tensor_rank = divmod(rank, tensor)
    rest, context_rank = divmod(rest, context)
    stage, data_rank = divmod(rest, data)
    rest, expert_tensor_rank = divmod(rank % (tensor * context * data), expert_tensor)
    expert_data_rank, expert_rank = divmod(rest, expert)
    return Coordinates(
        tensor=tensor_rank,
        context=context_rank,
        data=data_rank,
        pipeline=stage,
        expert=expert_rank,
        expert_tensor=expert_tensor_rank,
        expert_data=expert_data_rank,
    )


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
    """Place of every rank, [world_size]."""
    per_node = parallel.world_size // parallel.nodes
    return [_place(rank, per_node, parallel) for rank in range(parallel.world_size)]


def _place(rank: int, per_node: int, parallel: ParallelConfig) -> RankPlace:
    place = coordinates(
        rank,
        tensor=parallel.tensor,
        context=parallel.context,
        data=parallel.data,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor_size,
    )
    return RankPlace(
        rank=rank,
        node=rank // per_node,
        device=rank % per_node,
        tensor=place.tensor,
        context=place.context,
        data=place.data,
        pipeline=place.pipeline,
        expert=place.expert,
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
