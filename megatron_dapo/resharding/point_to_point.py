"""Messages point to point: gloo for CPU tensors, NCCL for CUDA tensors.

Trainer ranks and the workers of one engine form a process group (`meeting`), trainers first; each
engine has its own group, so that one that dies takes no other along. The next batch
of messages is packed while the last one travels: a rank holds at most two buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.resharding.meeting import Meeting, first_line
from megatron_dapo.resharding.messages import Message, Outbox
from megatron_dapo.resharding.transport import UpdatePayload

if TYPE_CHECKING:
    from megatron_dapo.resharding.plan import ReshardPlan

MAGIC = 0x4D44_4150_4F57
HEADER_BYTES = 32
"""Before each message: magic number, version, bucket, trainer rank; int64."""


@dataclass
class _InFlight:
    """A batch under way: one work for each message and engine."""

    works: list[tuple[dist.Work, Message, Meeting]]

    def wait(self) -> None:
        while self.works:
            work, message, meeting = self.works.pop(0)
            try:
                meeting.finish(work)
            except RuntimeError as error:
                del work  # it would keep the connections open that tell the others
                self.works.clear()
                who = meeting.name(meeting.trainers + message.receiver)
                raise RuntimeError(
                    f"{who} did not take bucket {message.bucket} of the new weights within "
                    f"{meeting.timeout.total_seconds():g} s, or died: {first_line(error)}"
                ) from error


class PointToPointSender:
    """One trainer rank's sending.

    Args:
        meetings: one for each engine.
        device: of the staging buffers: CPU for gloo, this rank's CUDA device for NCCL.
        bucket_bytes: of the plan; two staging buffers of at most this size exist while sending.
    """

    def __init__(
        self, meetings: Sequence[Meeting], rank: int, device: torch.device, bucket_bytes: int
    ) -> None:
        self._meetings = list(meetings)
        self._rank, self._device, self._bucket_bytes = rank, device, bucket_bytes
        self._groups: dict[int, dist.ProcessGroup] = {}
        self.staging_bytes = 0

    def prepare(self, version: int, outbox: Outbox) -> None:
        """Nothing: the engines are told first."""

    def describe(self, payload: UpdatePayload) -> None:
        """Name the group that each engine joins."""
        payload["generations"] = [meeting.generation for meeting in self._meetings]

    def send(self, version: int, outbox: Outbox, engines: tuple[int, ...]) -> None:
        """Send every message to its worker of each engine; joins them on first use.

        Raises:
            RuntimeError: a worker that did not come, died, or does not take its message in time.
                The groups of these engines are of no use any more: `rejoin`.
        """
        for engine in engines:
            if engine not in self._groups:
                self._groups[engine] = self._meetings[engine].join(self._rank, self._device)
        batches = outbox.batches(self._bucket_bytes)
        room = max((framed_bytes(m.num_bytes for m in batch) for batch in batches), default=0)
        slots = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in batches[:2]]
        self.staging_bytes = max(self.staging_bytes, room * len(slots))
        under_way: deque[_InFlight] = deque()
        try:
            for number, batch in enumerate(batches):
                if len(under_way) == len(slots):
                    under_way.popleft().wait()
                under_way.append(self._start(version, outbox, batch, slots[number % 2], engines))
            while under_way:
                under_way.popleft().wait()
        finally:
            under_way.clear()  # after an error they would keep connections open

    def _start(
        self,
        version: int,
        outbox: Outbox,
        batch: Sequence[Message],
        slot: Tensor,
        engines: tuple[int, ...],
    ) -> _InFlight:
        framed_messages: list[Tensor] = []
        offset = 0
        for message in batch:
            framed = slot[offset : offset + framed_bytes([message.num_bytes])]
            offset += framed.numel()
            header = (MAGIC, version, message.bucket, self._rank)
            framed[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(header))
            whole = framed[: HEADER_BYTES + message.num_bytes]
            outbox.pack(message, whole[HEADER_BYTES:])
            framed_messages.append(whole)
        started = _InFlight([])
        for engine in engines:
            meeting = self._meetings[engine]
            calls = [
                partial(self._send, engine, message, whole)
                for message, whole in zip(batch, framed_messages, strict=True)
            ]
            try:
                works = meeting.post(self._groups[engine], calls)
            except RuntimeError:
                started.works.clear()
                raise
            started.works += [
                (work, message, meeting) for work, message in zip(works, batch, strict=True)
            ]
        return started

    def _send(self, engine: int, message: Message, whole: Tensor) -> dist.Work:
        meeting = self._meetings[engine]
        to = meeting.trainers + message.receiver
        try:
            return self._groups[engine].send([whole], to, message.bucket)
        except RuntimeError as error:
            raise RuntimeError(
                f"{meeting.name(to)} cannot be sent bucket {message.bucket} of the new weights: "
                f"{first_line(error)}"
            ) from error

    def call_off(self, engines: tuple[int, ...], reason: str) -> None:
        """All who wait for a member of these engines' groups stop."""
        for engine in engines:
            self._meetings[engine].call_off(reason)

    def rejoin(self, engines: tuple[int, ...]) -> None:
        """Leave the groups of these engines; the next payload names new ones."""
        for engine in engines:
            self._leave(engine)
            old = self._meetings[engine]
            self._meetings[engine] = replace(old, generation=old.generation + 1)

    def acknowledged(self, version: int) -> None:
        """Nothing is kept of any version."""

    def close(self) -> None:
        """Leave all groups."""
        for engine in list(self._groups):
            self._leave(engine)

    def _leave(self, engine: int) -> None:
        if engine in self._groups:
            self._meetings[engine].leave(self._groups.pop(engine))


def framed_bytes(sizes: Iterable[int]) -> int:
    """Room for messages with their headers, each aligned to 8 bytes."""
    return sum(HEADER_BYTES + size + -size % 8 for size in sizes)


class PointToPointReceiver:
    """One engine worker's receiving: the next bucket travels while one is unpacked.

    Args:
        meeting: of this engine; its generation comes with each update.
        receiver: this worker's tensor rank.
        device: of the messages.
    """

    def __init__(
        self, plan: ReshardPlan, meeting: Meeting, receiver: int, device: torch.device
    ) -> None:
        self._plan, self._meeting = plan, meeting
        self._receiver, self._device = receiver, device
        self._group: dist.ProcessGroup | None = None
        self._version = -1
        self._slots: list[Tensor] = []
        self._expected: deque[tuple[int, int, Tensor, dist.Work]] = deque()
        self._asked = 0
        self.staging_bytes = 0
        self._sizes = [plan.message_sizes(bucket, receiver) for bucket in range(plan.num_buckets)]

    def begin(self, payload: UpdatePayload) -> None:
        """Join the trainers, on first use or after a failure, and ask for the first buckets.

        Raises:
            RuntimeError: trainers that did not join within the timeout, by name.
        """
        self.end()
        generation = payload["generations"][self._meeting.replica]
        if self._group is None or generation != self._meeting.generation:
            self._leave()
            self._meeting = replace(self._meeting, generation=generation)
            rank = self._meeting.trainers + self._receiver
            self._group = self._meeting.join(rank, self._device)
        self._version = payload["policy_version"]
        room = max((framed_bytes(sizes.values()) for sizes in self._sizes), default=0)
        self._slots = [
            torch.empty(room, dtype=torch.uint8, device=self._device) for _ in self._sizes[:2]
        ]
        self.staging_bytes = max(self.staging_bytes, room * len(self._slots))
        for bucket in range(len(self._slots)):
            self._ask_for(bucket)

    def _ask_for(self, bucket: int) -> None:
        assert self._group is not None, "begin joins before it asks"
        slot, offset = self._slots[bucket % 2], 0
        messages: list[tuple[int, Tensor]] = []
        for sender, size in self._sizes[bucket].items():
            messages.append((sender, slot[offset : offset + HEADER_BYTES + size]))
            offset += framed_bytes([size])
        calls = [partial(self._recv, bucket, sender, whole) for sender, whole in messages]
        works = self._meeting.post(self._group, calls)
        for (sender, whole), work in zip(messages, works, strict=True):
            self._expected.append((bucket, sender, whole, work))
        self._asked = bucket + 1

    def _recv(self, bucket: int, sender: int, whole: Tensor) -> dist.Work:
        assert self._group is not None, "begin joins before it asks"
        try:
            return self._group.recv([whole], sender, bucket)
        except RuntimeError as error:
            raise self._lost(bucket, sender, error) from error

    def receive(self, bucket: int, sender: int) -> Tensor:
        """One message: a view of a staging buffer."""
        while not self._expected and self._asked <= bucket < len(self._sizes):
            self._ask_for(self._asked)
        due = self._expected[0][:2] if self._expected else None
        if due != (bucket, sender):
            raise RuntimeError(
                f"(bucket, trainer rank) {bucket, sender} is asked for, next is {due}: messages "
                "are taken in plan order, each once"
            )
        if self._asked == bucket + 1 < len(self._sizes):
            self._ask_for(self._asked)  # into the slot of the bucket before, which is done with
        _, _, whole, work = self._expected.popleft()
        try:
            self._meeting.finish(work)
        except RuntimeError as error:
            raise self._lost(bucket, sender, error) from error
        finally:
            del work  # after an error it would keep the connections open that tell the others
        found = tuple(whole[:HEADER_BYTES].view(torch.int64).tolist())
        if found != (MAGIC, self._version, bucket, sender):
            raise RuntimeError(
                f"a message says version {found[1]}, bucket {found[2]}, trainer rank {found[3]}; "
                f"expected are version {self._version}, bucket {bucket}, trainer rank {sender}"
            )
        return whole[HEADER_BYTES:]

    def _lost(self, bucket: int, sender: int, error: RuntimeError) -> RuntimeError:
        self._leave()
        return RuntimeError(
            f"bucket {bucket} of the new weights did not come from {self._meeting.name(sender)} "
            f"within {self._meeting.timeout.total_seconds():g} s, or it died: {first_line(error)}"
        )

    def end(self) -> None:
        """Release the staging buffers; a group with messages under way is left."""
        if self._expected:
            self._leave()
        self._slots = []
        self._asked = 0

    def _leave(self) -> None:
        """Close all connections, so that the others do not wait for this worker."""
        self._expected.clear()
        if self._group is not None:
            self._meeting.leave(self._group)
        self._group = None

    def close(self) -> None:
        """Leave the group."""
        self.end()
        self._leave()
