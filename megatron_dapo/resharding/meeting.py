"""Process groups of the trainer ranks and the workers of one engine: how they meet, wait and part.

They meet through a file in the run's private directory, so that no port is opened for that and
nothing is pickled. After a failure over NCCL a member aborts its end of the group; where NCCL or
its watchdog ends the process instead, the launcher ends the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dapo.resharding.transport import (
    CALLED_OFF,
    POLL_SECONDS,
    called_off,
    member_name,
    open_store,
    reason_to_stop,
    wait_for_notes,
)

LOOPBACK = "127.0.0.1"
NCCL_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Meeting:
    """Where the trainers and the workers of one engine find each other."""

    directory: Path
    replica: int
    generation: int
    trainers: int
    workers: int
    backend: str
    """gloo or nccl."""
    timeout: timedelta

    @property
    def path(self) -> Path:
        return self.directory / f"group_{self.replica}_{self.generation}"

    def name(self, rank: int) -> str:
        """How errors call a member."""
        return member_name(rank, self.trainers, self.replica)

    def call_off(self, reason: str) -> None:
        """Members stop waiting for each other."""
        open_store(self.path).set(CALLED_OFF, reason)

    def join(self, rank: int, device: torch.device) -> dist.ProcessGroup:
        """The group, once all members are there. Each member calls it.

        Args:
            device: of its messages.

        Raises:
            RuntimeError: members that did not come within the timeout, by name; or the transfer
                was called off.
        """
        size = self.trainers + self.workers
        store = open_store(self.path)
        store.set_timeout(self.timeout)
        store.set(f"here_{rank}", "1")
        keys = [f"here_{member}" for member in range(size)]
        try:
            wait_for_notes(store, keys, self.timeout)
        except TimeoutError as error:
            missing = [self.name(m) for m, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(
                f"{', '.join(missing)} did not join the transfer of weights within "
                f"{self.timeout.total_seconds():g} s (resharding.timeout_seconds); look at the log "
                "of that process"
            ) from error
        return self._group(dist.PrefixStore("group", store), rank, size, device)

    def leave(self, group: dist.ProcessGroup) -> None:
        """Stop all that is under way. Over gloo connections close with the last reference."""
        if self.backend == "nccl":
            group.abort()

    def post(
        self, group: dist.ProcessGroup, calls: Sequence[Callable[[], dist.Work]]
    ) -> list[dist.Work]:
        """Start sends and receives of one member; the work of each.

        NCCL takes them as one, in the one communicator of all members: their order among each
        other then cannot block.
        """
        if self.backend != "nccl" or not calls:
            return [call() for call in calls]
        group._start_coalescing()  # type: ignore[call-arg]
        for call in calls:
            call()
        return [group._end_coalescing()] * len(calls)  # type: ignore[call-arg]

    def finish(self, work: dist.Work) -> None:
        """Wait for one of them.

        Raises:
            RuntimeError: it is not done within the timeout, failed, or was called off.
        """
        if self.backend == "nccl":  # which does not notice that a peer has gone
            self._watch(work)
        try:
            work.wait(self.timeout)
        finally:
            del work  # after an error it would keep the connections open that tell the others

    def _watch(self, work: dist.Work) -> None:
        now = time.monotonic()
        deadline, look = now + self.timeout.total_seconds(), now + POLL_SECONDS
        while not work.is_completed() and (now := time.monotonic()) < deadline:
            if now >= look:
                reason = reason_to_stop(open_store(self.path))
                if reason is not None:
                    raise called_off(reason)
                look = now + POLL_SECONDS
            time.sleep(NCCL_POLL_SECONDS)

    def _group(
        self, store: dist.Store, rank: int, size: int, device: torch.device
    ) -> dist.ProcessGroup:
        if self.backend == "nccl":
            if not dist.is_nccl_available():
                raise RuntimeError(
                    "resharding.transport=nccl: this build of torch has no NCCL. Use gloo or files"
                )
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = self.timeout
            group = ProcessGroupNCCL(store, rank, size, nccl)
            group.eager_connect_single_device(device)
            return group  # type: ignore[return-value]
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = self.timeout
        gloo._devices = [_gloo_device()]
        try:
            return dist.ProcessGroupGloo(store, rank, size, gloo)  # type: ignore[return-value]
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name(rank)} could not connect to trainers and workers of engine "
                f"{self.replica}: {first_line(error)}. They use loopback unless "
                "GLOO_SOCKET_IFNAME names the interface that joins their machines"
            ) from error


def _gloo_device() -> dist.ProcessGroupGloo.Device:
    """The interface that the environment names; else loopback, which no other machine reaches."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    return dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)


def first_line(error: BaseException) -> str:
    """What happened, without advice of the library below."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
