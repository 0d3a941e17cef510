"""Bags of two ranks, one of which saw nothing of a metric."""

import torch.distributed as dist

from megatron_dapo.observability.metrics import (
    Kind,
    MetricBag,
    maximum,
    mean,
    minimum,
    reduce_bags,
    total,
)
from tests.ranks import run_ranks

NAMES: dict[str, Kind] = {
    "entropy": "mean",
    "last_stage_only": "mean",
    "ratio_max": "max",
    "ratio_min": "min",
    "skipped": "sum",
    "tokens": "sum",
    "nobody": "mean",
}


def _reduce(rank: int, world: int) -> None:
    bag = MetricBag()
    bag.add("entropy", mean([1.0, 200.0][rank], [1, 100][rank]))
    bag.add("ratio_max", maximum([1.1, 0.9][rank]))
    bag.add("ratio_min", minimum([1.1, 0.9][rank]))
    bag.add("skipped", total(1.0))
    bag.add("tokens", total(2.0**24 + 1))  # more than float32 can count
    if rank == 1:
        bag.add("last_stage_only", mean(3.0, 2))
    assert reduce_bags(bag, NAMES, dist.group.WORLD).values() == {
        "entropy": 201.0 / 101.0,
        "last_stage_only": 1.5,
        "ratio_max": 1.1,
        "ratio_min": 0.9,
        "skipped": 2.0,
        "tokens": 2.0**25 + 2,
    }, f"{rank=} of {world}"


def test_every_rank_holds_the_metrics_of_all() -> None:
    run_ranks(2, _reduce)
