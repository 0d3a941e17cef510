"""Which checkpoint a run goes on from: verified by all ranks, the damaged ones set aside."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_dapo.checkpoint.commit import (
    ManifestError,
    clear_leftovers,
    find_faults,
    list_corrupt,
    list_steps,
    read_manifest,
    set_aside,
    step_folder,
)
from megatron_dapo.checkpoint.durable_files import FileRecord, content_faults
from megatron_dapo.config.errors import RunFailed
from megatron_dapo.parallel.collectives import decided_by_rank_0

logger = logging.getLogger(__name__)
_OWNER = re.compile(r"(?:__|rank_)(\d+)")
"""Which rank wrote a file, in its name: `__3_0.distcp`, `rank_00003.pt`."""


def find_checkpoint(folder: Path, group: ProcessGroup) -> Path | None:
    """The newest checkpoint whose every byte is as written, on every rank; None without any.

    Every rank calls it, for a run directory that this run owns. Rank 0 first clears what dead
    saves left, and decides; the ranks share the reading. A damaged one is renamed and named in the
    log, and the one before it is tried.

    Raises:
        RunFailed: on every rank, where there were checkpoints and none is left to trust.
        ConfigError: on every rank: another version of this package wrote one that would be next, in
            another format. It is left as it is.
    """
    decided_by_rank_0(lambda: clear_leftovers(folder), group)
    while True:
        step = decided_by_rank_0(lambda: _newest(folder), group)
        if step is None:
            break
        checkpoint = step_folder(folder, step)
        faults = damage_found_together(checkpoint, group)
        if not faults:
            return checkpoint
        if dist.get_rank(group) == 0:
            set_aside(checkpoint, faults[0])
    corrupt = decided_by_rank_0(lambda: list_corrupt(folder), group)
    if corrupt:
        raise RunFailed(
            f"no checkpoint in {folder} can be trusted: {', '.join(path.name for path in corrupt)} "
            "were found damaged and set aside. Look at them; to start anew, name another run_dir "
            "or move them away"
        )
    return None


def damage_found_together(checkpoint: Path, group: ProcessGroup) -> list[str]:
    """Faults of a checkpoint, the same on every rank; the ranks share the reading. Collective."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mine = decided_by_rank_0(lambda: find_faults(checkpoint), group)
    if not mine:
        try:
            mine = list(content_faults(checkpoint, _share(read_manifest(checkpoint), rank, world)))
        except ManifestError as error:
            mine = [str(error)]
    faults: list[list[str]] = [[]] * world
    dist.all_gather_object(faults, mine, group=group)
    return [fault for part in faults for fault in part]


def _newest(folder: Path) -> int | None:
    """The newest step that has all files, after setting aside those that have not."""
    for step in reversed(list_steps(folder)):
        checkpoint = step_folder(folder, step)
        faults = find_faults(checkpoint)
        if not faults:
            return step
        set_aside(checkpoint, faults[0])
    return None


def _share(records: Mapping[str, FileRecord], rank: int, world: int) -> dict[str, FileRecord]:
    """Files that this rank reads: its own, and on rank 0 those of nobody."""
    owners = {name: _OWNER.match(name.rpartition("/")[2]) for name in records}
    return {
        name: records[name]
        for name, owner in owners.items()
        if (int(owner[1]) % world if owner else 0) == rank
    }
