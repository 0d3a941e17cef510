"""What a plan amounts to, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Most that a trainer rank sends over the mean of those that hold the same shard; worst
    shard."""
    num_buckets: int
    bucket_bytes: int
    memory_bound: int
    """Two buckets: most that a transport holds beside the model, on either side."""
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
    shares = (shares for _, shares in plan.bytes_by_replica() if sum(shares))
    return PlanSummary(
        fingerprint=plan.fingerprint,
        trainer_ranks=plan.train.world_size,
        engine_ranks=plan.engine.world_size,
        bytes_moved=plan.bytes_moved,
        lower_bound=plan.lower_bound,
        ratio=plan.bytes_moved / plan.lower_bound,
        imbalance=max(max(each) * len(each) / sum(each) for each in shares),
        num_buckets=plan.num_buckets,
        bucket_bytes=plan.bucket_bytes,
        memory_bound=2 * plan.bucket_bytes,
        blocks=plan.blocks,
        shared_blocks=plan.shared_blocks,
        bytes_by_sender=plan.bytes_by_sender(),
        bytes_by_receiver=plan.bytes_by_receiver(),
    )
