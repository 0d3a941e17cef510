"""Room for the weights that a run publishes as files, asked for before the first update."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_dapo.resharding.plan import ReshardPlan

VERSIONS = 2
"""A version goes once the engines serve the next one."""
MIB = 2**20


def check_free_space(directory: Path, plan: ReshardPlan) -> None:
    """Refuse a directory that cannot hold the versions that lie in it at the same time. Local.

    Raises:
        ValueError: its file system has less space free.
    """
    wanted = VERSIONS * plan.bytes_moved // plan.engine.replicas
    free = shutil.disk_usage(directory).free
    if free < wanted:
        raise ValueError(
            f"resharding.transport=files: {directory} has {free / MIB:,.1f} MiB free, and "
            f"{VERSIONS} versions of the weights take {wanted / MIB:,.1f} MiB. Enlarge it (in a "
            "container /dev/shm is small unless asked for), remove what others left there, or use "
            "another resharding.transport"
        )
