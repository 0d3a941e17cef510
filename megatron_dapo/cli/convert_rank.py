"""One rank of a conversion: `python -m megatron_dapo.cli.convert_rank`, started by `convert`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.observability.logs import quiet_logs


def main(argv: Sequence[str] | None = None) -> int:
    """Take part in one conversion as the rank that the environment names."""
    parser = argparse.ArgumentParser(prog="python -m megatron_dapo.cli.convert_rank")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    quiet_logs()

    from megatron_dapo import device
    from megatron_dapo.checkpoint.commit import CHECKPOINTS
    from megatron_dapo.checkpoint.state import save_checkpoint
    from megatron_dapo.config import load_config
    from megatron_dapo.config.errors import EXIT_CONFIG, EXIT_FAILED, RunFailed
    from megatron_dapo.config.pretrained import pretrained_config
    from megatron_dapo.parallel.launch_env import read_launch_env
    from megatron_dapo.policy.model import build_chunks
    from megatron_dapo.resharding.load import load_hf_weights
    from megatron_dapo.session import join_ranks

    config = load_config(options.config)
    environment = read_launch_env(os.environ)
    device.select(config.device, local_rank=environment.local_rank)
    source = config.model.path
    hf_config = pretrained_config(config.model)
    parallel = join_ranks(config, environment)
    chunks = build_chunks(config, hf_config, parallel)
    try:
        try:
            load_hf_weights(chunks, hf_config, source, parallel)
        except ValueError as error:
            sys.stderr.write(f"configuration: {source}: {error}\n")
            return EXIT_CONFIG
        save_checkpoint(
            options.out / CHECKPOINTS,
            0,
            chunks=chunks,
            optimizer=None,
            state={},
            parallel=parallel,
            keep=1,
        )
    except RunFailed as error:
        sys.stderr.write(f"{options.out} is not written: {error}\n")
        return EXIT_FAILED
    finally:
        parallel.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
