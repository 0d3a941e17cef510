"""Run a function on several ranks, one spawn for many checks (a spawn costs seconds)."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _enter(
    rank: int, world: int, store: str, backend: str, function: Callable[..., None], args: tuple
) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", RANK=str(rank))
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        function(rank, world, *args)
        dist.barrier()
    except BaseException:
        Path(f"{store}.rank{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def run_ranks(
    world: int, function: Callable[..., None], *args: object, backend: str = "gloo"
) -> None:
    """Call `function(rank, world, *args)` on `world` fresh processes joined by `backend`.

    With nccl each has the CUDA device of its rank.

    `function` must be importable (top level of a module). The first failing rank's traceback
    is raised as an AssertionError.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        try:
            mp.spawn(_enter, (world, store, backend, function, args), nprocs=world, join=True)
        except Exception as error:
            tracebacks = [p.read_text() for p in sorted(Path(folder).glob("store.rank*"))]
            raise AssertionError("\n".join(tracebacks) or str(error)) from error
