"""What moves messages from trainer ranks to engine ranks: the two sides, and what they agree on.

A message is the flat bytes of the transfers of one bucket from one trainer rank to one engine
rank, in plan order. Both sides hold the same plan, so a message carries no names and no shapes.
A transport only moves messages; it knows nothing of parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megatron_dapo.resharding.messages import Outbox


LEADER = 0
"""Global rank that makes the directory and talks to the engines."""
FAILURES = (OSError, RuntimeError, ValueError, MemoryError)
"""What packing and moving messages may raise on one rank, and all ranks must learn of."""
CALLED_OFF = "called_off"
"""Note in the store of an engine and the trainers: why nobody needs to wait for the others."""
POLL_SECONDS = 0.2
"""Between two looks for that note, and for an engine that has failed."""
EngineFailure = Callable[[], BaseException | None]
"""On rank 0: what an engine of the open update has failed with; None: nothing so far."""


class InitInfo(TypedDict):
    """`init_info` of /init_weight_transfer_engine; JSON. Enough to compute the trainer's plan."""

    transport: str
    """files, gloo, nccl or cuda_ipc."""
    directory: str
    """Private directory of the run: nothing outside it is read or joined."""
    train_layout: dict[str, int]
    """Fields of `TrainLayout`."""
    engine_layout: dict[str, int | bool | str | None]
    """Fields of `EngineLayout`; the dtype by its name, such as "bfloat16"."""
    bucket_bytes: int
    fingerprint: str
    """Of the trainer's plan; the engine refuses another one."""
    replica: int
    """Which engine this is."""
    timeout_seconds: float
    """Longest wait for the other side."""


class UpdatePayload(TypedDict):
    """`update_info` of /update_weights; JSON, the same for every engine."""

    policy_version: int
    folder: str
    """files: directory of the published version; else empty."""
    generations: list[int]
    """For each engine: which process group of it to join. Groups are not reused after a failure."""


class Sender(Protocol):
    """The trainer's side, one on every trainer rank. Every rank calls each method."""

    def prepare(self, version: int, outbox: Outbox) -> None:
        """Publish what engines may read on their own, before they are told."""

    def describe(self, payload: UpdatePayload) -> None:
        """Add what an engine must know to receive the version."""

    def send(self, version: int, outbox: Outbox, engines: tuple[int, ...]) -> None:
        """Hand all messages to these engines; they are in `update_weights` meanwhile."""

    def call_off(self, engines: tuple[int, ...], reason: str) -> None:
        """Nobody waits any more for a transfer to one of these engines. From any thread."""

    def rejoin(self, engines: tuple[int, ...]) -> None:
        """These engines have restarted: meet them anew."""

    def acknowledged(self, version: int) -> None:
        """All engines serve the version: what only earlier ones need may go."""

    def close(self) -> None:
        """Release everything; may be called twice."""

    @property
    def staging_bytes(self) -> int:
        """Most memory held beside the model, and beside published files, so far."""


class Receiver(Protocol):
    """The engine's side, one in every engine worker."""

    def begin(self, payload: UpdatePayload) -> None:
        """An update starts. Joins the trainers where the transport needs it."""

    def receive(self, bucket: int, sender: int) -> Tensor:
        """The next message, flat uint8 of `plan.message_bytes`, on the worker's device.

        Called once for each sender of each bucket: buckets ascending, senders in the order of
        `plan.senders_of`. The result is valid until the next call.

        Raises:
            RuntimeError: it does not come within the timeout, comes for another version, or is
                asked for out of order; the message names bucket and trainer rank.
        """

    def end(self) -> None:
        """The update is over, also after an error: release its memory."""

    def close(self) -> None:
        """Leave; may be called twice."""

    @property
    def staging_bytes(self) -> int:
        """Most memory held beside the model so far."""


def new_payload(version: int, engines: int) -> UpdatePayload:
    """A payload in which only the version is filled in."""
    return UpdatePayload(policy_version=version, folder="", generations=[0] * engines)


def member_name(rank: int, trainers: int, replica: int) -> str:
    """How errors name a member of the group of `trainers` ranks and one engine's workers."""
    if rank < trainers:
        return f"trainer rank {rank}"
    return f"rank {rank - trainers} of engine {replica}"


def open_store(path: Path) -> dist.FileStore:
    """Notes between the trainers and the workers of one engine; whoever comes first makes it.

    It goes with its directory, not with its members: one that comes late must find the notes.
    """
    return dist.FileStore(str(path))


def reason_to_stop(store: dist.Store) -> str | None:
    """Why the transfer was called off; None: it was not."""
    return store.get(CALLED_OFF).decode() if store.check([CALLED_OFF]) else None


def wait_for_notes(store: dist.Store, keys: Sequence[str], timeout: timedelta) -> None:
    """Return once all notes are there.

    Raises:
        TimeoutError: they are not within the timeout.
        RuntimeError: the transfer was called off; the message says why.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        if (reason := reason_to_stop(store)) is not None:
            raise called_off(reason)
        left = min(deadline - time.monotonic(), POLL_SECONDS)
        try:
            store.wait(list(keys), timedelta(seconds=max(left, 0.001)))
            return
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"not within {timeout.total_seconds():g} s") from error


def called_off(reason: str) -> RuntimeError:
    """How every member says it."""
    return RuntimeError(f"the transfer of weights was called off: {reason}")
