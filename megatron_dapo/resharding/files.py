"""Messages through files: for engines that see the trainers' shared memory or file system.

One safetensors file for each trainer rank and tensor rank of the engines, one flat tensor in it
for each bucket. All ranks write at the same time, straight from their parameters into the mapped
file; a version becomes visible by one rename after all have written. Every replica reads the same
files, and a restarted engine can load the current version as long as there is no newer one.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dapo.config.weight_files import make_header
from megatron_dapo.resharding.messages import Outbox
from megatron_dapo.resharding.transport import FAILURES, UpdatePayload

if TYPE_CHECKING:
    from megatron_dapo.resharding.plan import ReshardPlan


def version_folder(directory: Path, version: int) -> Path:
    """Where a version is, once it is complete."""
    return directory / f"policy_{version}"


def file_name(sender: int, receiver: int) -> str:
    """Of what one trainer rank has for one tensor rank of the engines."""
    return f"from_{sender}_to_{receiver}.safetensors"


class FileSender:
    """One trainer rank's writing.

    Args:
        directory: the same on all ranks and in the engines.
        commit: called by all ranks with what failed on this one (None: nothing); raises on all of
            them if any failed, and returns after all have called it.
        leads: this rank renames and removes for all.
    """

    staging_bytes = 0
    """Parameters are copied into the files and nowhere else."""

    def __init__(
        self, directory: Path, commit: Callable[[Exception | None], None], *, leads: bool
    ) -> None:
        self._directory, self._commit, self._leads = directory, commit, leads
        self._unfinished: Path | None = None

    def prepare(self, version: int, outbox: Outbox) -> None:
        """Write and publish a version; the previous one stays.

        Raises:
            RuntimeError: on all ranks, if one could not write its files.
        """
        final = version_folder(self._directory, version)
        unfinished = final.with_suffix(".tmp")

        def make_room() -> None:
            for folder in (unfinished, final):
                shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
            unfinished.mkdir()

        self._together(make_room if self._leads else None)
        self._together(lambda: write_messages(unfinished, version, outbox))
        self._together((lambda: unfinished.rename(final)) if self._leads else None)

    def _together(self, work: Callable[[], object] | None) -> None:
        """Do this rank's part of a step, and go on once all ranks have done theirs."""
        failure: Exception | None = None
        try:
            if work is not None:
                work()
        except FAILURES as error:
            failure = error
        self._commit(failure)

    def describe(self, payload: UpdatePayload) -> None:
        """Name the folder of the version."""
        payload["folder"] = str(version_folder(self._directory, payload["policy_version"]))

    def send(self, version: int, outbox: Outbox, engines: tuple[int, ...]) -> None:
        """Nothing: engines read the files on their own."""

    def call_off(self, engines: tuple[int, ...], reason: str) -> None:
        """Nothing: nobody waits."""

    def rejoin(self, engines: tuple[int, ...]) -> None:
        """Nothing: the files are still there."""

    def acknowledged(self, version: int) -> None:
        """Remove all other versions."""
        if self._leads:
            keep = version_folder(self._directory, version)
            for folder in self._directory.glob("policy_*"):
                if folder != keep:
                    shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Nothing: the files go with their directory."""


def write_messages(folder: Path, version: int, outbox: Outbox) -> None:
    """Write all messages of one trainer rank, a file for each receiver.

    Raises:
        OSError: the file system is full or gone.
    """
    sizes: dict[int, dict[str, int]] = {}
    for message in outbox:
        sizes.setdefault(message.receiver, {})[f"bucket_{message.bucket}"] = message.num_bytes
    metadata = {"policy_version": str(version), "plan": outbox.plan.fingerprint}
    with ExitStack() as stack:
        files: dict[int, Iterator[Tensor]] = {}
        for receiver, tensors in sizes.items():
            path = folder / file_name(outbox.sender, receiver)
            files[receiver] = iter(stack.enter_context(_mapped(path, tensors, metadata)))
        for message in outbox:
            outbox.pack(message, next(files[message.receiver]))


@contextmanager
def _mapped(
    path: Path, sizes: Mapping[str, int], metadata: Mapping[str, str]
) -> Iterator[list[Tensor]]:
    """A new safetensors file of flat uint8 tensors, as writable views of the mapped file.

    Its space is reserved first, so that a full file system is an error and not a signal.
    """
    header = make_header(((name, "U8", (n,), n) for name, n in sizes.items()), metadata)
    total = len(header) + sum(sizes.values())
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, total)
        mapping = mmap.mmap(descriptor, total)
    finally:
        os.close(descriptor)
    mapping[: len(header)] = header
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    yield list(whole[len(header) :].split(list(sizes.values())))
    mapping.flush()  # other machines of a shared file system read it next


class FileReceiver:
    """One engine worker's reading.

    Args:
        plan: the trainer's, computed here.
        receiver: this worker's tensor rank.
        directory: nothing outside it is read.
        device: of the messages; on CPU they are the mapped file itself.
    """

    def __init__(
        self, plan: ReshardPlan, receiver: int, directory: Path, device: torch.device
    ) -> None:
        self._plan, self._receiver, self._device = plan, receiver, device
        self._directory = directory.resolve()
        self._folder: Path | None = None
        self._version = -1
        self._open = ExitStack()
        self._files: dict[int, tuple[safe_open, frozenset[str]]] = {}
        self.staging_bytes = 0
        """Most memory of the device that messages took; mapped files are the page cache's."""

    def begin(self, payload: UpdatePayload) -> None:
        """Turn to the version that the payload names; its files are opened as they are asked for.

        Raises:
            ValueError: the payload names a folder outside the directory.
        """
        self.end()
        folder = Path(payload["folder"]).resolve()
        if folder.parent != self._directory:
            raise ValueError(
                f"weights in {payload['folder']!r} are not in {str(self._directory)!r}, the "
                "directory that init_weight_transfer_engine named; publish there"
            )
        self._folder, self._version = folder, payload["policy_version"]

    def receive(self, bucket: int, sender: int) -> Tensor:
        """One message; on CPU a read-only view of the file."""
        if self._folder is None:
            raise RuntimeError("receive before begin: no version was announced")
        path = self._folder / file_name(sender, self._receiver)
        wanted = self._plan.message_bytes(bucket, sender, self._receiver)
        name = f"bucket_{bucket}"
        try:
            if sender not in self._files:
                self._files[sender] = self._open_file(path, bucket, sender)
            file, names = self._files[sender]
            values = file.get_tensor(name) if name in names else None
        except SafetensorError as error:
            raise RuntimeError(
                f"bucket {bucket} of trainer rank {sender} cannot be read: {path.name} in "
                f"{self._folder} is cut short or damaged: {error}"
            ) from error
        if values is None or values.numel() != wanted:
            found = "is missing" if values is None else f"has {values.numel()} bytes"
            raise RuntimeError(
                f"bucket {bucket} of trainer rank {sender} {found} in {path.name} of "
                f"{self._folder}, planned are {wanted} bytes; the file is incomplete or of another "
                "update"
            )
        if self._device.type != "cpu":
            values = values.to(self._device)
            self.staging_bytes = max(self.staging_bytes, wanted)
        return values

    def _open_file(self, path: Path, bucket: int, sender: int) -> tuple[safe_open, frozenset[str]]:
        """A sender's file of the version, open until the end of the update; what is in it."""
        if not path.is_file():
            raise RuntimeError(
                f"bucket {bucket} of trainer rank {sender} is missing: there is no {path.name} in "
                f"{self._folder}"
            )
        file = self._open.enter_context(safe_open(path, framework="pt", device="cpu"))
        self._check_origin(path, file.metadata())
        return file, frozenset(file.keys())

    def _check_origin(self, path: Path, metadata: Mapping[str, str] | None) -> None:
        origin = metadata or {}
        wanted = {"policy_version": str(self._version), "plan": self._plan.fingerprint}
        for name, value in wanted.items():
            if origin.get(name) != value:
                raise RuntimeError(
                    f"{path.name} in {path.parent} is of {name} {origin.get(name)!r}, expected is "
                    f"{value!r}"
                )

    def end(self) -> None:
        """Forget the version and close its files."""
        self._folder = None
        self._files.clear()
        self._open.close()

    def close(self) -> None:
        """Close what is open."""
        self.end()
