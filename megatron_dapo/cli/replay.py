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
    if not (folder / RESOLVED_FILE).is_file():
        raise ConfigError(
            f"DUMP={folder}: holds no {RESOLVED_FILE}. Give the folder RUN_DIR/dumps/step_N that a "
            "run wrote when training.stop_after_skipped stopped it"
        )
    world_size = load_config(folder / RESOLVED_FILE).parallel.world_size
    return launch_ranks(["-m", "megatron_dapo.replay", str(folder)], world_size, folder / "logs")
