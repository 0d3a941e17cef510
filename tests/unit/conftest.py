"""Fixtures of all unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch.distributed as dist


@dataclass(frozen=True)
class Alone:
    """What is read of a `ParallelContext` by code that talks to other ranks, of the only one."""

    control_group: dist.ProcessGroup
    rank: int = 0
    tp_rank: int = 0
    cp_rank: int = 0
    is_last_stage: bool = True


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Alone(dist.group.WORLD)
    dist.destroy_process_group()
