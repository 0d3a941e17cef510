"""Who am I in this job? Read from torchrun's or SLURM's environment, then join the others."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

RENDEZVOUS_VARIABLE = "MEGATRON_DAPO_RENDEZVOUS"
"""file:// address where the ranks of one machine meet; set by `megatron-dapo train`."""
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """Place of this process among the trainer ranks."""

    rank: int
    world_size: int
    local_rank: int
    """Place on this machine; also the index of its CUDA device."""
    master_host: str
    master_port: int | None
    """None: the launcher opened no port (`rendezvous`) or none was given."""
    rendezvous: str | None = None
    """file:// address that replaces host and port on one machine."""


def read_launch_env(environ: Mapping[str, str]) -> LaunchEnv:
    """Rank, world size and meeting point from torchrun's (RANK, ...) or SLURM's variables.

    torchrun's win where both exist: a torchrun inside a SLURM job. With neither, this process
    is the whole job. A SLURM step's node list goes before the job's: a heterogeneous job has
    its trainers on some nodes only.

    Raises:
        ValueError: a variable is missing, or is no integer, or the rank is outside the world.
    """
    port = _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
    rendezvous = environ.get(RENDEZVOUS_VARIABLE)
    if "RANK" in environ:
        rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
        local_rank = _integer(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
        host = environ.get("MASTER_ADDR", "127.0.0.1")
    elif "SLURM_PROCID" in environ:
        rank, local_rank = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_LOCALID")
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        world_size = _integer(environ, tasks)
        nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
        host = environ.get("MASTER_ADDR") or expand_nodelist(_text(environ, nodes))[0]
    else:
        rank, world_size, local_rank, host = 0, 1, 0, "127.0.0.1"
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of a world of {world_size}: need 0 <= rank < world size.")
    return LaunchEnv(rank, world_size, local_rank, host, port, rendezvous)


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ValueError(f"environment variable {name} is missing. Start with srun or torchrun.")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = _text(environ, name)
    if not value.strip().isdecimal():
        raise ValueError(f"environment variable {name}={value!r}: need a non-negative integer.")
    return int(value)


def expand_nodelist(nodelist: str) -> list[str]:
    """Host names of a SLURM node list, in order: gpu[003-004,7],login1 -> gpu003 gpu004 gpu7 ...

    Raises:
        ValueError: brackets do not pair, or a range runs backwards.
    """
    if not re.fullmatch(r"(?:[^\[\],\s]+|\[[\d,-]+\]|,)+", nodelist):
        raise ValueError(
            f"SLURM node list {nodelist!r}: expected names like gpu[003-004,007],login1."
        )
    parts = re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", nodelist)
    return [host for part in parts for host in _expand_brackets(part)]


def _expand_brackets(name: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", name)
    if match is None:
        return [name]
    head, tail = name[: match.start()], name[match.end() :]
    return [
        head + number + rest
        for item in match.group(1).split(",")
        for number in _expand_range(item)
        for rest in _expand_brackets(tail)
    ]


def _expand_range(item: str) -> list[str]:
    first, dash, last = item.partition("-")
    last = last if dash else first
    if not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        raise ValueError(f"SLURM node range {item!r}: expected first-last, for example 003-004.")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def init_process_group(env: LaunchEnv, *, timeout: timedelta, backend: str) -> None:
    """Join all trainer ranks in torch.distributed's default group.

    Every rank calls it, once. With gloo and all ranks on one machine the sockets are bound to
    the loopback interface, so nothing listens outside.

    Args:
        timeout: longest wait inside one collective of the default group.
        backend: "nccl" or "gloo", of `device.backend()`.

    Raises:
        ValueError: several ranks, but neither a rendezvous file nor a port to meet at.
    """
    if backend == "gloo" and (env.rendezvous is not None or env.master_host in _LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        init_method=None if env.world_size == 1 else _meeting_point(env),
        store=dist.HashStore() if env.world_size == 1 else None,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
    )


def _meeting_point(env: LaunchEnv) -> str:
    if env.rendezvous is not None:
        return env.rendezvous
    if env.master_port is None:
        raise ValueError(
            f"MASTER_PORT is missing for {env.world_size} ranks that meet at {env.master_host}. "
            "Set it to one free port for all ranks, as examples/qwen32b/run.sh does."
        )
    return f"tcp://{env.master_host}:{env.master_port}"
