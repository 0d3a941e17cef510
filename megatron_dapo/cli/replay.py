"""`megatron-dapo replay RUN_DIR/dumps/step_N`: an update with a broken gradient, once more."""

from __future__ import annotations

from pathlib import Path

from megatron_dapo.cli.launch import launch_ranks
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.load import RESOLVED_FILE


def replay_dump(folder: Path) -> int:
    """Start the ranks of the dump on this machine; 0 when the gradient is finite this time.

    Raises:
        ConfigError: `folder` is no dump.
    """
    resolved = folder / RESOLVED_FILE
    missing = [] if resolved.is_file() else [RESOLVED_FILE]
    world_size = 1 if missing else load_config(resolved).parallel.world_size
    files = [f"rank_{rank}.pt" for rank in range(world_size)]
    missing += [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"DUMP={folder}: holds no {', '.join(missing[:3])}. Give the folder "
            "RUN_DIR/dumps/step_N, whole, that a run wrote when training.stop_after_skipped "
            "stopped it"
        )
    return launch_ranks(["-m", "megatron_dapo.replay", str(folder)], world_size, folder / "logs")
