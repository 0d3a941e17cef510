"""One save in two parts: all ranks decide what is written; then each writes, and one commits.

The second part talks over its own group and touches nothing that training changes, so it may run
in a thread. Whatever fails on one rank fails the save on every rank, with the same message.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_dapo.checkpoint.commit import commit, unfinished_folder
from megatron_dapo.checkpoint.durable_files import (
    FileRecord,
    content_faults,
    write_durably,
)
from megatron_dapo.checkpoint.retention import remove_old
from megatron_dapo.checkpoint.tensors import (
    Places,
    StagedTensors,
    tensor_file,
    write_description,
    write_tensors,
)
from megatron_dapo.config.checkpoint import CheckpointConfig
from megatron_dapo.config.errors import RunFailed
from megatron_dapo.config.whole_files import sync_directory

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class CheckpointError(RunFailed):
    """A checkpoint was not written; what was there before still is."""


@dataclass(frozen=True)
class StagedSave:
    """What this rank writes of one checkpoint."""

    folder: Path
    """Of all checkpoints."""
    step: int
    tensors: dict[str, StagedTensors]
    """By the folder in the checkpoint that they go to."""
    files: dict[str, bytes]
    """Name in the checkpoint -> content."""

    @property
    def bytes(self) -> int:
        """That this rank will write, but for small change."""
        return sum(part.bytes for part in self.tensors.values()) + sum(
            map(len, self.files.values())
        )


@dataclass(frozen=True)
class _Written:
    """What one rank has written."""

    records: dict[str, FileRecord]
    places: dict[str, Places]


def write_save(staged: StagedSave, settings: CheckpointConfig, group: ProcessGroup) -> None:
    """Write, read again, commit, and delete what no rule keeps. Every rank of `group` calls it.

    Rank 0 of the group commits. The old checkpoints go after the new one stands.

    Raises:
        CheckpointError: on every rank, when one could not write; nothing of the save is left.
    """
    rank = dist.get_rank(group)
    unfinished = unfinished_folder(staged.folder, staged.step)
    try:
        sizes = _together(lambda: staged.bytes, group)
        _together(lambda: _make_room(staged, sum(sizes)) if rank == 0 else None, group)
        parts = _together(lambda: _write(staged, unfinished, rank), group)
        _together(lambda: _finish(staged, unfinished, parts) if rank == 0 else None, group)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if rank == 0:
        logger.info("step %d is saved", staged.step)
        remove_old(staged.folder, settings)
    dist.barrier(group=group)


def _make_room(staged: StagedSave, needed: int) -> None:
    """Fresh folders for the save, where the disk has room for all of it."""
    unfinished = unfinished_folder(staged.folder, staged.step)
    if not staged.folder.is_dir():
        staged.folder.mkdir(parents=True)
        sync_directory(staged.folder.parent)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    free = shutil.disk_usage(staged.folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{needed} bytes are needed and {free} are free", str(staged.folder)
        )
    names = [*staged.tensors, *(name.rpartition("/")[0] for name in staged.files)]
    unfinished.mkdir()
    for name in sorted({"random", *names} - {""}):
        (unfinished / name).mkdir()


def _write(staged: StagedSave, unfinished: Path, rank: int) -> _Written:
    """This rank's files, flushed and read again."""
    records: dict[str, FileRecord] = {}
    places: dict[str, Places] = {}
    for folder, part in staged.tensors.items():
        record, places[folder] = write_tensors(part, unfinished / folder, rank)
        records[f"{folder}/{tensor_file(rank)}"] = record
    for name, content in staged.files.items():
        records[name] = write_durably(unfinished / name, content)
    _read_again(unfinished, records)
    return _Written(records, places)


def _finish(staged: StagedSave, unfinished: Path, parts: Sequence[_Written]) -> None:
    """The files that describe the others' tensors, and the commit."""
    records: dict[str, FileRecord] = {}
    for folder, part in staged.tensors.items():
        places = [written.places[folder] for written in parts]
        described = write_description(part, unfinished / folder, places)
        records |= {f"{folder}/{name}": record for name, record in described.items()}
    _read_again(unfinished, records)
    for written in parts:
        records |= written.records
    commit(staged.folder, staged.step, records)


def _read_again(folder: Path, records: dict[str, FileRecord]) -> None:
    for fault in content_faults(folder, records):
        raise OSError(errno.EIO, f"{fault}: the storage does not keep what is written", str(folder))


def _together(work: Callable[[], ResultT], group: ProcessGroup) -> list[ResultT]:
    """Results of `work` of all ranks on rank 0, [] elsewhere, once no rank failed.

    Raises:
        CheckpointError: on every rank, when the work of one met an OSError.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    result, fault = None, ""
    try:
        result = work()
    except OSError as error:
        fault = f"rank {rank}: {error}"
    gathered: list[tuple[str, ResultT]] | None = [("", None)] * world if rank == 0 else None  # type: ignore[list-item]
    dist.gather_object((fault, result), gathered, group_dst=0, group=group)
    verdict = [next((text for text, _ in gathered or () if text), "")]
    dist.broadcast_object_list(verdict, group_src=0, group=group)
    if verdict[0]:
        raise CheckpointError(verdict[0])
    return [part for _, part in gathered or ()]
