"""What a plan amounts to, in a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from megatron_dapo.resharding.block_grid import SCALE_SUFFIX
from megatron_dapo.resharding.plan import ReshardPlan


@dataclass(frozen=True)
class PlanSummary:
    """Figures of one weight update; bytes as the engines keep the numbers."""

    fingerprint: str
    trainer_ranks: int
    engine_ranks: int
    bytes_moved: int
    """Over all engines."""
    lower_bound: int
    """Bytes that the engines own."""
    ratio: float
    imbalance: float
    """What a trainer rank sends, over what it would send if all shards that it holds were shared
    out exactly; worst rank."""
    num_buckets: int
    bucket_bytes: int
    memory_bound: int
    """Two of the largest buckets: what a transport holds beside the model, on either side."""
    rebuilt_bytes: int
    """Most that an engine rank holds at a time of modules whose kernel keeps another layout; 0 for
    modules that it keeps as they come."""
    blocks: int
    """Of FP8 matrices, in the whole model; 0: the engines are not quantised."""
    shared_blocks: int
    """Those that lie on several trainer ranks, which exchange their maxima before they send."""
    bytes_by_sender: dict[int, int]
    """Global trainer rank -> bytes to all engines."""
    bytes_by_receiver: dict[int, int]
    """Engine rank -> bytes."""


def summarize(plan: ReshardPlan) -> PlanSummary:
    """The figures of a plan; seconds for the largest models."""
    sent = plan.bytes_by_sender()
    return PlanSummary(
        fingerprint=plan.fingerprint,
        trainer_ranks=plan.train.world_size,
        engine_ranks=plan.engine.world_size,
        bytes_moved=plan.bytes_moved,
        lower_bound=plan.lower_bound,
        ratio=plan.bytes_moved / plan.lower_bound,
        imbalance=max(sent[rank] / share for rank, share in even_shares(plan).items() if share),
        num_buckets=plan.num_buckets,
        bucket_bytes=plan.bucket_bytes,
        memory_bound=2 * plan.largest_bucket_bytes,
        rebuilt_bytes=rebuilt_bytes(plan),
        blocks=plan.blocks,
        shared_blocks=plan.shared_blocks,
        bytes_by_sender=sent,
        bytes_by_receiver=plan.bytes_by_receiver(),
    )


def rebuilt_bytes(plan: ReshardPlan) -> int:
    """Most bytes of matrices that engine rank 0 has open at a time, if its kernels keep none of
    them in the layout of the checkpoint.

    A module is open from the first bucket that reaches it to the end of the last one: the senders
    of a bucket come one after the other, each with its part of every module.
    """
    spans: dict[str, tuple[int, int]] = {}
    for bucket in range(plan.num_buckets):
        for entry in plan.entries_of(bucket):
            if plan.map.local_expert(entry.expert, 0) is None:
                continue
            for name, _ in entry.rule.hf:
                fused = plan.map.fused(name)
                if fused.quantized:
                    matrix = fused.parameter.format(layer=entry.layer)
                    spans[matrix] = spans.get(matrix, (bucket, bucket))[0], bucket
    module_spans: dict[str, tuple[int, int]] = {}
    for matrix, (first, last) in spans.items():
        earlier = module_spans.get(_module(matrix), (first, last))
        module_spans[_module(matrix)] = min(first, earlier[0]), max(last, earlier[1])
    opened = [0] * (plan.num_buckets + 1)
    for name, content, shape in plan.map.contents(0):
        if name.removesuffix(SCALE_SUFFIX) in spans:
            first, last = module_spans[_module(name)]
            size = math.prod(shape) * plan.engine.bytes_of(content)
            opened[first] += size
            opened[last + 1] -= size
    return max(accumulate(opened))


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def even_shares(plan: ReshardPlan) -> dict[int, float]:
    """Trainer rank -> bytes to all engines, if every shard were shared out exactly."""
    even = dict.fromkeys(range(plan.train.world_size), 0.0)
    for shard, shares in plan.bytes_by_replica():
        for replica in range(len(shares)):
            even[plan.train.rank(shard, replica)] += (
                sum(shares) / len(shares) * plan.engine.replicas
            )
    return even
