"""What a launch script must know of a configuration, as shell assignments.

    eval "$(python -m megatron_dapo.planning.job JOB_ID CONFIG.yaml section.key=value ...)"

Standard library and configuration only, so that it answers on a login node.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping

from megatron_dapo.config.checks import check_config
from megatron_dapo.config.errors import EXIT_CONFIG, ConfigError
from megatron_dapo.config.load import load_config
from megatron_dapo.config.machine_checks import decide_device
from megatron_dapo.config.model_shape import ModelShape, read_hf_config
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.planning.memory import GIB, checkpoint_bytes
from megatron_dapo.planning.ports import engine_port, master_port

EXIT_USAGE = 2


def job_facts(config: RunConfig, hf_config: Mapping[str, object], job_id: int) -> dict[str, str]:
    """Shell variable -> value: sizes and port of `config` run as SLURM job `job_id`."""
    parallel = config.parallel
    checkpoint = checkpoint_bytes(config, ModelShape.from_hf(hf_config))
    return {
        "RUN_DIR": str(config.run_dir),
        "DEVICE": config.device,
        "NODES": str(parallel.nodes),
        "RANKS_PER_NODE": str(parallel.world_size // parallel.nodes),
        "CHECKPOINT_GIB": str(math.ceil(checkpoint / GIB)),
        "MASTER_PORT": str(master_port(job_id)),
        "ENGINE_NODES": str(config.rollout.engine_nodes),
        "ENGINES": str(config.rollout.engines),
        "ENGINE_DEVICES": str(config.rollout.engine_tensor),
        "ENGINE_PORT": str(engine_port(job_id)),
    }


def main(arguments: list[str]) -> int:
    """Write the facts of one job to standard output; 78 when the configuration is refused."""
    if len(arguments) < 2 or not arguments[0].isdecimal():
        sys.stderr.write("usage: python -m megatron_dapo.planning.job JOB_ID CONFIG [key=value]\n")
        return EXIT_USAGE
    try:
        config = load_config(arguments[1], arguments[2:])
        hf_config = read_hf_config(config.model.path)
        check_config(decide_device(config), hf_config)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    facts = job_facts(config, hf_config, int(arguments[0]))
    sys.stdout.write("".join(f"{name}={shlex.quote(value)}\n" for name, value in facts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
