"""A rank that is slower than the others, step after step: a sick device or a busy machine."""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

FACTOR = 2.0
LEAST_SECONDS = 0.5
"""Beyond the median; what lies below is noise of short phases."""
STEPS_IN_A_ROW = 3


@dataclass
class Stragglers:
    """Watches the seconds that each rank needs for the same work without waiting for another data
    rank. Ranks that share a layer or a pipeline wait for each other and show the same time."""

    slow_rank: int = -1
    in_a_row: int = 0

    def compare(self, seconds: float, group: ProcessGroup) -> float:
        """Slowest rank's time over the median, on every rank. Collective: one number each.

        Global rank 0 warns when the same rank was slow three steps in a row.

        Args:
            seconds: of this rank.
        """
        every = torch.zeros(dist.get_world_size(group), dtype=torch.float64)
        every[dist.get_rank(group)] = seconds
        dist.all_reduce(every, group=group)
        ratio, warning = self.judge(every.tolist())
        if warning and dist.get_rank() == 0:
            logger.warning("%s", warning)
        return ratio

    def judge(self, seconds: list[float]) -> tuple[float, str]:
        """Ratio of one step, by rank; and a warning, or ""."""
        median, slowest = statistics.median_low(seconds), max(seconds)
        rank, ratio = seconds.index(slowest), slowest / max(median, 1e-9)
        slow = ratio > FACTOR and slowest - median > LEAST_SECONDS
        self.in_a_row = (self.in_a_row if rank == self.slow_rank else 0) + 1 if slow else 0
        self.slow_rank = rank if slow else -1
        if self.in_a_row < STEPS_IN_A_ROW:
            return ratio, ""
        self.in_a_row = 0
        return ratio, (
            f"rank {rank} needed {slowest:.3g} s for its old log-probs, the median of the ranks is "
            f"{median:.3g} s, {STEPS_IN_A_ROW} steps in a row: look at its device and machine"
        )
