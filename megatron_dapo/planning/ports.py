"""Network ports of a SLURM job, all derived from its id, so that neighbours never collide."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PORT = 20000
LAST_PORT = 31999
"""Below 32768, where Linux starts to hand out ephemeral ports."""


@dataclass(frozen=True)
class JobPorts:
    """Ports that one job may open."""

    master: int
    """Rendezvous of the trainer ranks (MASTER_PORT)."""
    weight_sync: int
    """Rendezvous of trainer rank 0 with the engines' workers."""


def job_ports(job_id: int) -> JobPorts:
    """Ports of `job_id`: the same every time, and others for each of the next 5,999 ids."""
    if job_id < 0:
        raise ValueError(f"job id {job_id}: must be a SLURM job id, 0 or more")
    ports_per_job = len(JobPorts.__dataclass_fields__)
    slots = (LAST_PORT - FIRST_PORT + 1) // ports_per_job
    first = FIRST_PORT + job_id % slots * ports_per_job
    return JobPorts(*range(first, first + ports_per_job))
