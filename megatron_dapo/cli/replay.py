"""`megatron-dapo replay RUN_DIR/dumps/step_N`: an update with a broken gradient, once more."""

from __future__ import annotations

from pathlib import Path

from megatron_dapo.cli.launch import launch_ranks
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.wrong_target import RESOLVED_FILE, run_of, what_is

DUMPS = "dumps"
"""In a run directory."""


def replay_dump(folder: Path) -> int:
    """Start the ranks of the dump on this machine; 0 when the gradient is finite this time.

    Raises:
        ConfigError: `folder` is no dump.
    """
    resolved = folder / RESOLVED_FILE
    if not (resolved.is_file() and any(folder.glob("rank_*.pt"))):
        raise ConfigError(
            f"DUMP={folder} {what_is(folder)}; give a folder RUN_DIR/{DUMPS}/step_N that a run "
            f"wrote when training.stop_after_skipped stopped it.{_dumps_of(folder)}"
        )
    world_size = load_config(resolved).parallel.world_size
    files = [f"rank_{rank}.pt" for rank in range(world_size)]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"DUMP={folder}: {len(missing)} of {world_size} ranks are missing, first {missing[0]}. "
            "Give the folder as a run wrote it, whole"
        )
    return launch_ranks(["-m", "megatron_dapo.replay", str(folder)], world_size, folder / "logs")


def _dumps_of(folder: Path) -> str:
    """Which dumps there are, where a run is known."""
    run = run_of(folder)
    if run is None:
        return ""
    found = sorted(path.name for path in (run / DUMPS).glob("step_*"))
    return f" {run / DUMPS} holds {', '.join(found) or 'none'}"
