"""Messages through CUDA IPC: for engines whose workers share a machine with the trainers.

A trainer rank packs a batch of messages into one of two staging buffers on its device and says so;
workers map the buffers once and read their messages where they lie; a buffer is packed again when
all its readers have gone on. Buffers and mappings are kept from update to update. Handles and these
short notes travel as JSON through a file in the run's private directory. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.resharding.messages import Message, Outbox, fill
from megatron_dapo.resharding.transport import (
    CALLED_OFF,
    LEADER,
    UpdatePayload,
    member_name,
    open_store,
    wait_for_notes,
)

if TYPE_CHECKING:
    from megatron_dapo.resharding.plan import ReshardPlan

_HANDLE_FIELDS = (
    "handle",
    "size_bytes",
    "offset_bytes",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "event_sync_required",
)
"""What torch exports of a storage beside its device: bytes, int, int, bytes, int, bytes, bool."""
_BYTES_FIELDS = {"handle", "counter_handle", "event_handle"}


def require_cuda() -> None:
    """Refuse to go on where CUDA IPC cannot work.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "resharding.transport=cuda_ipc: this process sees no CUDA device; it shares memory of "
            "GPUs. Use files or gloo on CPU"
        )


def device_uuid(index: int) -> str:
    """Name of a GPU that is the same in every process of the machine."""
    return str(torch.cuda.get_device_properties(index).uuid)


def export_buffer(buffer: Tensor) -> str:
    """A CUDA buffer as JSON that one other process of the machine can map, once.

    Torch counts its users by export. The buffer must live until who mapped it is done.
    """
    _, *fields = buffer.untyped_storage()._share_cuda_()
    note: dict[str, str | int] = {"device": device_uuid(buffer.device.index)}
    for name, value in zip(_HANDLE_FIELDS, fields, strict=True):
        note[name] = value.hex() if name in _BYTES_FIELDS else int(value)
    return json.dumps(note)


def map_buffer(note: str, whose: str) -> Tensor:
    """The buffer of `export_buffer`, flat uint8, on its own device.

    Raises:
        RuntimeError: its GPU is not among the visible ones; the message says whose it is.
    """
    fields = json.loads(note)
    visible = {device_uuid(index): index for index in range(torch.cuda.device_count())}
    if fields["device"] not in visible:
        raise RuntimeError(
            f"weights of {whose} are on GPU {fields['device']}, which this worker does not see; it "
            f"sees {sorted(visible)}. Show engines all GPUs of the machine (CUDA_VISIBLE_DEVICES), "
            "or set resharding.transport=files"
        )
    index = visible[fields["device"]]
    values = [
        bytes.fromhex(fields[name]) if name in _BYTES_FIELDS else fields[name]
        for name in _HANDLE_FIELDS
    ]
    values[-1] = bool(values[-1])
    storage = torch.UntypedStorage._new_shared_cuda(index, *values)
    buffer = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
    return buffer.set_(storage)  # type: ignore[call-overload]


@dataclass(frozen=True)
class NoteBoard:
    """Short notes between the trainers and the workers of one engine.

    Each version has a board of its own, so that notes do not pile up; what is good for many
    versions, the handles of buffers, is on another one.
    """

    directory: Path
    replica: int
    generation: int
    trainers: int
    workers: int
    timeout: timedelta

    def open(self, version: int | None = None) -> dist.FileStore:
        """The board of a version, or of the handles; whoever comes first makes it."""
        store = open_store(self._path("handles" if version is None else str(version)))
        store.set_timeout(self.timeout)
        return store

    def remove(self, *, but: int) -> None:
        """Forget the notes about all other versions; nobody may be using them."""
        kept = {self._path("handles"), self._path(str(but))}
        for path in self.directory.glob(f"notes_{self.replica}_*"):
            if path not in kept:
                path.unlink()

    def _path(self, what: str) -> Path:
        return self.directory / f"notes_{self.replica}_{self.generation}_{what}"

    def read(self, store: dist.Store, key: str, what: str) -> str:
        """A note, once it is there.

        Raises:
            RuntimeError: it is not within the timeout; the message says `what` did not happen. Or
                the transfer was called off.
        """
        try:
            wait_for_notes(store, [key], self.timeout)
        except TimeoutError as error:
            raise RuntimeError(
                f"{what} within {self.timeout.total_seconds():g} s (resharding.timeout_seconds)"
            ) from error
        return store.get(key).decode()


def place(messages: Iterable[Message]) -> list[int]:
    """Where each message of a batch starts in its buffer, aligned to 8 bytes; then the end."""
    starts = [0]
    for message in messages:
        starts.append(starts[-1] + message.num_bytes + -message.num_bytes % 8)
    return starts


class CudaIpcSender:
    """One trainer rank's side.

    Args:
        boards: one for each engine.
        device: this rank's.
        bucket_bytes: of the plan; two staging buffers of at most this size exist from the first
            update on.

    Raises:
        RuntimeError: there is no CUDA device.
    """

    def __init__(
        self, boards: Sequence[NoteBoard], rank: int, device: torch.device, bucket_bytes: int
    ) -> None:
        require_cuda()
        self._boards = list(boards)
        self._rank, self._device, self._bucket_bytes = rank, device, bucket_bytes
        self._handles: dict[int, dist.FileStore] = {}
        """By engine: where it finds the buffers."""
        self._notes: dict[int, dist.FileStore] = {}
        """By engine: about the version that is sent."""
        self._version = -1
        self._slots: list[Tensor] = []
        self._shared: set[tuple[int, int, int]] = set()
        """(engine, slot, worker) of every export."""
        self._sent: set[int] = set()
        self.staging_bytes = 0

    def prepare(self, version: int, outbox: Outbox) -> None:
        """A version that was sent before needs boards without notes about it."""
        self._version = version
        if version in self._sent:
            self.rejoin(tuple(range(len(self._boards))))

    def describe(self, payload: UpdatePayload) -> None:
        """Name the boards that each engine reads."""
        payload["generations"] = [board.generation for board in self._boards]

    def send(self, version: int, outbox: Outbox, engines: tuple[int, ...]) -> None:
        """Offer every message to its worker of each engine and wait until all have been read.

        Raises:
            RuntimeError: a worker that does not read in time, by name; then `rejoin`.
        """
        self._sent.add(version)
        self._notes = {engine: self._boards[engine].open(version) for engine in engines}
        for engine in engines:
            if engine not in self._handles:
                self._handles[engine] = self._boards[engine].open()
        batches = outbox.batches(self._bucket_bytes)
        slots = self._share(batches, engines)
        prefix = f"{version}_{self._rank}"
        for number, batch in enumerate(batches):
            if number >= len(slots):
                self._wait_until_read(prefix, number - 2, batches, engines)
            for message, start in zip(batch, place(batch)[:-1], strict=True):
                slot = slots[number % 2]
                outbox.pack(message, slot[start : start + message.num_bytes])
            torch.cuda.synchronize(self._device)  # readers see the buffer, not the stream
            for engine in engines:
                self._notes[engine].set(f"ready_{prefix}_{number}", "1")
        for number in range(max(len(batches) - 2, 0), len(batches)):
            self._wait_until_read(prefix, number, batches, engines)

    def _share(
        self, batches: Sequence[Sequence[Message]], engines: tuple[int, ...]
    ) -> list[Tensor]:
        """Two buffers with room for any batch, each exported once to every worker that reads it."""
        if not self._slots:
            room = max((place(batch)[-1] for batch in batches), default=0)
            self._slots = [
                torch.empty(room, dtype=torch.uint8, device=self._device) for _ in batches[:2]
            ]
            self.staging_bytes = room * len(self._slots)
        readers = {(n % 2, m.receiver) for n, batch in enumerate(batches) for m in batch}
        for engine in engines:
            for slot, worker in sorted(readers):
                if (engine, slot, worker) not in self._shared:
                    note = export_buffer(self._slots[slot])
                    self._handles[engine].set(f"buffer_{self._rank}_{slot}_{worker}", note)
                    self._shared.add((engine, slot, worker))
        return self._slots

    def _wait_until_read(
        self,
        prefix: str,
        number: int,
        batches: Sequence[Sequence[Message]],
        engines: tuple[int, ...],
    ) -> None:
        for engine in engines:
            board = self._boards[engine]
            for message in batches[number]:
                who = member_name(board.trainers + message.receiver, board.trainers, engine)
                board.read(
                    self._notes[engine],
                    f"read_{prefix}_{number}_{message.receiver}",
                    f"{who} did not read bucket {message.bucket} of the new weights",
                )

    def call_off(self, engines: tuple[int, ...], reason: str) -> None:
        """All who wait on the boards of these engines stop."""
        for engine in engines:
            self._boards[engine].open(self._version).set(CALLED_OFF, reason)

    def rejoin(self, engines: tuple[int, ...]) -> None:
        """Leave the boards of these engines; the next payload names new ones."""
        for engine in engines:
            self._handles.pop(engine, None)
            self._notes.pop(engine, None)
            self._shared = {export for export in self._shared if export[0] != engine}
            old = self._boards[engine]
            self._boards[engine] = replace(old, generation=old.generation + 1)

    def acknowledged(self, version: int) -> None:
        """Notes about earlier versions go."""
        if self._rank == LEADER:
            for board in self._boards:
                board.remove(but=version)

    def close(self) -> None:
        """Leave all boards and let go of the buffers."""
        self._handles.clear()
        self._notes.clear()
        self._shared.clear()
        self._slots.clear()


class CudaIpcReceiver:
    """One engine worker's side.

    Args:
        board: of this engine; its generation comes with each update.
        receiver: this worker's tensor rank.
        device: of the messages; those from another GPU are copied there.

    Raises:
        RuntimeError: there is no CUDA device.
    """

    def __init__(
        self, plan: ReshardPlan, board: NoteBoard, receiver: int, device: torch.device
    ) -> None:
        require_cuda()
        self._plan, self._board, self._receiver, self._device = plan, board, receiver, device
        self._handles: dist.FileStore | None = None
        self._notes: dist.FileStore | None = None
        self._version = -1
        self._places: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._walked = 0
        """Buckets whose places are known."""
        self._batches: Counter[int] = Counter()
        """Of each sender in them."""
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._unread: str | None = None
        self.staging_bytes = 0

    def begin(self, payload: UpdatePayload) -> None:
        """Turn to the boards that the payload names."""
        self.end()
        generation = payload["generations"][self._board.replica]
        if self._handles is None or generation != self._board.generation:
            self._buffers.clear()  # they may be another process's by now
            self._board = replace(self._board, generation=generation)
            self._handles = self._board.open()
        self._version = payload["policy_version"]
        self._notes = self._board.open(self._version)

    def receive(self, bucket: int, sender: int) -> Tensor:
        """One message: a view of the sender's buffer, or a copy from another GPU."""
        self._release()
        assert self._handles is not None and self._notes is not None, "begin opens the boards"
        number, start, size = self._place(bucket, sender)
        prefix = f"{self._version}_{sender}"
        who = f"trainer rank {sender}"
        self._board.read(
            self._notes,
            f"ready_{prefix}_{number}",
            f"{who} did not offer bucket {bucket} of the new weights",
        )
        slot = number % 2
        if (sender, slot) not in self._buffers:
            note = self._board.read(
                self._handles,
                f"buffer_{sender}_{slot}_{self._receiver}",
                f"{who} did not share its buffers",
            )
            self._buffers[sender, slot] = map_buffer(note, who)
        message = self._buffers[sender, slot][start : start + size]
        self._unread = f"read_{prefix}_{number}_{self._receiver}"
        if message.device != self._device:
            message = message.to(self._device)
            self.staging_bytes = max(self.staging_bytes, size)
        return message

    def _place(self, bucket: int, sender: int) -> tuple[int, int, int]:
        """(batch of the sender, start, bytes) of the message, as the sender computes them."""
        while self._walked <= min(bucket, self._plan.num_buckets - 1):
            self._walk(self._walked)
            self._walked += 1
        if (bucket, sender) not in self._places:
            raise RuntimeError(f"the plan has no message of bucket {bucket} of rank {sender}")
        return self._places[bucket, sender]

    def _walk(self, bucket: int) -> None:
        """Note where this worker's messages of the next bucket lie, from their sizes alone."""
        messages: dict[int, list[Message]] = defaultdict(list)
        for receiver in range(self._board.workers):
            for sender, size in self._plan.message_sizes(bucket, receiver).items():
                messages[sender].append(Message(bucket, receiver, size, ()))
        for sender, found in messages.items():
            for batch in fill(found, self._plan.bucket_bytes):
                number = self._batches[sender]
                self._batches[sender] += 1
                for message, start in zip(batch, place(batch)[:-1], strict=True):
                    if message.receiver == self._receiver:
                        self._places[bucket, sender] = (number, start, message.num_bytes)

    def _release(self) -> None:
        """Say that the last message has been used, after the device has."""
        if self._unread is not None and self._notes is not None:
            torch.cuda.synchronize(self._device)
            self._notes.set(self._unread, "1")
        self._unread = None

    def end(self) -> None:
        """The last message has been used; the trainers' buffers stay mapped."""
        self._release()

    def close(self) -> None:
        """Leave the boards and let go of the trainers' buffers."""
        self.end()
        self._buffers.clear()
        self._handles = self._notes = None
