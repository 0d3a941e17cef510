"""The engine's side of a planned update: messages in, parameters written, digests out.

Everything here is independent of vLLM: how a parameter is reached is a `Part`'s business
(`vllm_layers`), how a message arrives is the transport's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_dapo.resharding.digest import as_hex, as_matrix, parameter_digest
from megatron_dapo.resharding.messages import DTYPES, dtype_of, unpack
from megatron_dapo.resharding.plan import ReshardPlan, Transfer
from megatron_dapo.resharding.transport import Receiver, UpdatePayload

Way = Literal["live", "rebuilt", "loader"]
"""live: written in place. rebuilt: written in the checkpoint's layout, then brought into the
kernel's by vLLM. loader: handed to vLLM's own loader as full Hugging Face tensors."""


class Part(Protocol):
    """Targets of the plan that are written together: those of one module, in one way."""

    @property
    def way(self) -> Way: ...

    @property
    def targets(self) -> Mapping[str, tuple[int, ...]]:
        """Name of each target in the plan -> its shape."""

    def open(self) -> Mapping[str, Tensor]:
        """Tensors to write into, by target; live ones are the parameters themselves."""

    def close(self) -> None:
        """All targets are written: let the engine use them."""


class PlannedWeights:
    """What one engine worker needs to take updates by a plan.

    It keeps no weights between updates, only digests and counts.

    Args:
        plan: the trainer's, computed here.
        tensor_rank: of this worker in its engine.
        parts: together every target that the plan writes on this rank, each once.
        receiver: this worker's end of the transport.

    Raises:
        ValueError: a target without a part, or a part without a target in the plan.
    """

    def __init__(
        self, plan: ReshardPlan, tensor_rank: int, parts: Sequence[Part], receiver: Receiver
    ) -> None:
        self.plan, self.tensor_rank, self.receiver = plan, tensor_rank, receiver
        self._parts = tuple(parts)
        self._part_of = {target: part for part in parts for target in part.targets}
        self._dtype = DTYPES[plan.engine.dtype]
        self._padding = plan.padding(tensor_rank)
        if different := sorted(set(plan.parameters(tensor_rank)) ^ self._part_of.keys()):
            raise ValueError(
                f"plan and engine differ in {len(different)} parameters, the first is "
                f"{different[0]!r}; model and versions of both sides must be the same"
            )
        self._missing: Counter[str] = Counter()
        self._tensors: dict[Part, Mapping[str, Tensor]] = {}
        self._digests: dict[str, Tensor] = {}
        self._bytes_received, self._peak_bytes, self._seconds = 0, 0, 0.0

    @torch.no_grad()
    def receive(self, payload: UpdatePayload) -> None:
        """Take one whole update. Afterwards every parameter of the plan is new.

        Raises:
            RuntimeError: a message is missing, damaged or of another update, or the plan does not
                fill a parameter. The parameters are then in no defined state.
            ValueError: the payload names a place where no weights may come from.
        """
        started = time.monotonic()
        try:
            self._begin()
            self.receiver.begin(payload)
            for bucket, senders in enumerate(self._senders):
                for sender in senders:
                    self._take(bucket, sender)
        finally:
            self._tensors.clear()
            self.receiver.end()
        if self._missing:
            name, count = next(iter(self._missing.items()))
            raise RuntimeError(
                f"the plan left {len(self._missing)} parameters unfinished; {name!r} misses "
                f"{count} of its numbers"
            )
        self._seconds = time.monotonic() - started

    def digests(self) -> dict[str, str]:
        """Target -> digest.

        live: of what the engine computes with, now. rebuilt and loader: of what had arrived whole,
        before vLLM packed it; a fault of that step does not show here.
        """
        found = dict(self._digests)
        for part in self._parts:
            if part.way == "live":
                found |= {name: self._digest(name, tensor) for name, tensor in part.open().items()}
        names = list(self.plan.parameters(self.tensor_rank))
        values = torch.stack([found[name] for name in names]).tolist()  # waits for a GPU once
        return {name: as_hex(value) for name, value in zip(names, values, strict=True)}

    def report(self) -> dict[str, str | int | float]:
        """Counts of the last update, as JSON."""
        ways = Counter(part.way for part in self._parts for _ in part.targets)
        return {
            "plan": self.plan.fingerprint,
            "live": ways["live"],
            "rebuilt": ways["rebuilt"],
            "loader": ways["loader"],
            "bytes_received": self._bytes_received,
            "peak_extra_bytes": self._peak_bytes + self.receiver.staging_bytes,
            "seconds": self._seconds,
        }

    def close(self) -> None:
        """Leave the transport."""
        self.receiver.close()

    @cached_property
    def _senders(self) -> list[tuple[int, ...]]:
        """By bucket: the trainer ranks whose messages come, in their order."""
        buckets = range(self.plan.num_buckets)
        return [self.plan.senders_of(bucket, self.tensor_rank) for bucket in buckets]

    def _begin(self) -> None:
        self._digests, self._bytes_received, self._peak_bytes = {}, 0, 0
        self._missing = Counter()
        for part in self._parts:
            for name, shape in part.targets.items():
                self._missing[name] = torch.Size(shape).numel()
        for name, box in self._padding:
            values = as_matrix(self._open(self._part_of[name])[name])
            values[box.row : box.row + box.rows, box.col : box.col + box.cols] = 0
            self._count(name, box.elements)

    def _take(self, bucket: int, sender: int) -> None:
        """Receive and write one message."""
        transfers = self.plan.message(bucket, sender, self.tensor_rank)
        flat = self.receiver.receive(bucket, sender)
        for transfer, values in unpack(flat, transfers, self._dtype):
            self._write(transfer, values)
        self._bytes_received += flat.nbytes

    def _write(self, transfer: Transfer, values: Tensor) -> None:
        name, box = transfer.target, transfer.target_box
        matrix = as_matrix(self._open(self._part_of[name])[name])
        matrix[box.row : box.row + box.rows, box.col : box.col + box.cols].copy_(values)
        self._count(name, box.elements)

    def _open(self, part: Part) -> Mapping[str, Tensor]:
        if part not in self._tensors:
            self._tensors[part] = part.open()
            held = sum(
                tensor.nbytes
                for opened, tensors in self._tensors.items()
                if opened.way != "live"
                for tensor in tensors.values()
            )
            self._peak_bytes = max(self._peak_bytes, held)
        return self._tensors[part]

    def _count(self, name: str, elements: int) -> None:
        """Some numbers of a target are written; its part closes with the last of all targets."""
        self._missing[name] -= elements
        if self._missing[name] < 0:
            raise RuntimeError(f"{name!r} was written more than once; the plan is wrong")
        if self._missing[name]:
            return
        del self._missing[name]
        part = self._part_of[name]
        if any(target in self._missing for target in part.targets):
            return
        tensors = self._tensors.pop(part)
        if part.way != "live":
            for target, tensor in tensors.items():
                self._digests[target] = self._digest(target, tensor)
        part.close()

    def _digest(self, name: str, tensor: Tensor) -> Tensor:
        # What a kernel keeps in a wider dtype comes back exactly.
        values = tensor.detach().to(dtype_of(self.plan.content(name), self._dtype))
        return parameter_digest(values, word_bytes=self.plan.word_bytes(name))


class UpdateState:
    """Where a worker is between start and finish. What failed can never be finished."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Of the last update that was finished; None: the weights that the engine started with,
        or an update failed or is under way since."""
        self._stage: Literal["idle", "started", "receiving", "received"] = "idle"
        self._receiving: int | None = None

    @property
    def interrupted(self) -> bool:
        """An update began to write and did not end."""
        return self._stage == "receiving"

    def start(self) -> None:
        """Before an update. After one that failed, the next must bring everything."""
        if not self.interrupted:
            self._stage = "started"

    def begin(self, version: int) -> None:
        """Parameters are about to change."""
        if self._stage == "idle":
            raise RuntimeError("update_weights before start_weight_update: start the update first")
        self._stage, self._receiving, self.version = "receiving", version, None

    def received(self) -> None:
        """Every parameter is new."""
        self._stage = "received"

    def finish(self) -> None:
        """The update is complete.

        Raises:
            RuntimeError: it is not: some parameters may be new and others old.
        """
        if self._stage == "received":
            self._stage, self.version = "idle", self._receiving
            return
        if self._stage == "receiving":
            raise RuntimeError(
                f"the update to weights {self._receiving} failed or is incomplete: this worker "
                "holds a mixture of two versions and does not finish. Send a complete update, or "
                "restart the engine"
            )
        raise RuntimeError(
            "finish_weight_update without any update_weights: no weights came since the update "
            "was started"
        )
