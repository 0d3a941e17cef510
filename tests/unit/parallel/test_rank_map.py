"""Ranks sit where Megatron puts them."""

from __future__ import annotations

from megatron_dapo.config.schema import ParallelConfig
from megatron_dapo.parallel.rank_map import as_ranges, rank_map


def test_tensor_ranks_are_neighbours_and_stages_far_apart() -> None:
    places = rank_map(ParallelConfig(tensor=2, context=2, data=2, pipeline=2, nodes=2))
    assert [(p.tensor, p.context, p.data, p.pipeline) for p in places[:5]] == [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (1, 1, 0, 0),
        (0, 0, 1, 0),
    ]
    assert [p.rank for p in places if p.pipeline == 1] == list(range(8, 16))
    assert [(p.node, p.device) for p in places] == [(n, d) for n in (0, 1) for d in range(8)]


def test_experts_are_spread_over_tensor_context_and_data() -> None:
    places = rank_map(ParallelConfig(tensor=2, data=4, expert=4, pipeline=2))
    assert [p.expert for p in places] == [0, 1, 2, 3, 0, 1, 2, 3] * 2
    wide = rank_map(ParallelConfig(tensor=2, data=4, expert=2, expert_tensor=2))
    assert [p.expert for p in wide] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_every_place_is_taken_once() -> None:
    parallel = ParallelConfig(tensor=2, context=3, data=4, pipeline=2)
    places = {(p.tensor, p.context, p.data, p.pipeline) for p in rank_map(parallel)}
    assert len(places) == parallel.world_size


def test_numbers_are_shown_as_ranges() -> None:
    assert as_ranges([3, 1, 2, 7, 9, 8, 8]) == "1-3, 7-9"
    assert as_ranges([5]) == "5"
