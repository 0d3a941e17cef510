"""One rank of `megatron-dapo replay`: `python -m megatron_dapo.replay DUMP`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_dapo import device
from megatron_dapo.config import load_config
from megatron_dapo.config.pretrained import pretrained_config
from megatron_dapo.config.wrong_target import RESOLVED_FILE
from megatron_dapo.observability.logs import quiet_logs
from megatron_dapo.parallel.launch_env import read_launch_env
from megatron_dapo.policy.critic import Critic
from megatron_dapo.policy.failed_update import read_failed_update, replay
from megatron_dapo.policy.policy import Policy
from megatron_dapo.session import join_ranks


def main(arguments: list[str]) -> int:
    """Run the update of a dump again; 0 when its gradient is finite here, else 1."""
    quiet_logs()
    folder = Path(arguments[0])
    config = load_config(folder / RESOLVED_FILE)
    environment = read_launch_env(os.environ)
    device.select(config.device, local_rank=environment.local_rank)
    failed = read_failed_update(folder, environment.rank)
    parallel = join_ranks(config, environment)
    hf_config = pretrained_config(config.model)
    built = Policy if failed.model == Policy.name else Critic
    result, broken = replay(failed, built.build(config, hf_config, parallel))
    found: list[list[str]] = [[] for _ in range(parallel.world_size)]
    dist.all_gather_object(found, broken, group=parallel.control_group)
    if parallel.rank == 0:
        what = f"step {failed.step}, update of the {failed.model}"
        sys.stdout.write(f"{what}: gradient norm {result.grad_norm}\n")
        for rank, lines in enumerate(found):
            sys.stdout.write("".join(f"rank {rank}: not finite: {line}\n" for line in lines))
    parallel.destroy()
    return 1 if result.skipped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
