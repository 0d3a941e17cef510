"""The network ports of a SLURM job, derived from its id, so that neighbours never collide."""

from __future__ import annotations

FIRST_PORT = 20000
LAST_PORT = 31999
"""Below 32768, where Linux starts to hand out ephemeral ports."""


FIRST_ENGINE_PORT = 10000
LAST_ENGINE_PORT = 19999
ENGINES_A_NODE = 8
"""Ports of one job that may be in use on one node."""


def engine_port(job_id: int) -> int:
    """Port of engine 0 of `job_id`; engine n has the nth after it. The next job's begin 8 later."""
    if job_id < 0:
        raise ValueError(f"job id {job_id}: must be a SLURM job id, 0 or more")
    places = (LAST_ENGINE_PORT - FIRST_ENGINE_PORT + 1) // ENGINES_A_NODE
    return FIRST_ENGINE_PORT + job_id % places * ENGINES_A_NODE


def master_port(job_id: int) -> int:
    """Where the trainer ranks of `job_id` meet (MASTER_PORT): the same every time, and another one
    for each of the next 11,999 ids."""
    if job_id < 0:
        raise ValueError(f"job id {job_id}: must be a SLURM job id, 0 or more")
    return FIRST_PORT + job_id % (LAST_PORT - FIRST_PORT + 1)
