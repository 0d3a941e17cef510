"""The trainer's side of a weight update: from Megatron's shards into the engines' shards.

Every rank holds one `Bridge` and sends only what each engine rank needs. An update:

    payload = bridge.prepare(version)      # files are written here
    ...                                    # rank 0 tells the engines
    bridge.send(version)                   # point to point: messages travel here
    expected = bridge.expected_digests()   # what the engines must hold now, on rank 0
    ...                                    # rank 0 compares, the engines go on
    bridge.acknowledged(version)
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from megatron_dapo.config.resharding_checks import chosen_transport
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.device import current
from megatron_dapo.parallel.collectives import broadcast_tensors
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.resharding.block_scales import maxima_over
from megatron_dapo.resharding.cuda_ipc import CudaIpcSender, NoteBoard
from megatron_dapo.resharding.digest import as_hex
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.files import FileSender
from megatron_dapo.resharding.layout import (
    check_agrees,
    find_layout,
    local_parameters,
    source_parameters,
)
from megatron_dapo.resharding.meeting import Meeting
from megatron_dapo.resharding.messages import Outbox
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import ReshardPlan, build_plan
from megatron_dapo.resharding.point_to_point import PointToPointSender
from megatron_dapo.resharding.private_directory import SHARED_MEMORY, PrivateDirectory
from megatron_dapo.resharding.transport import (
    FAILURES,
    LEADER,
    POLL_SECONDS,
    EngineFailure,
    InitInfo,
    Sender,
    UpdatePayload,
    new_payload,
)

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

GRACE_SECONDS = 5.0
"""In which an engine that left a transfer says why."""


class Bridge:
    """One trainer rank's end of the bridge.

    Every rank calls every method, in the same order; the control group exchanges short notes and
    digests, weights go straight to the engines. Parameters are read by `prepare` (files) or `send`
    (other transports): no optimizer step may run before both have returned.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        sources: dict[str, Tensor],
        parallel: ParallelContext,
        *,
        transport: str,
        directory: Path,
        timeout: timedelta,
        verify_digests: bool = True,
        owned: PrivateDirectory | None = None,
        failure: EngineFailure | None = None,
    ) -> None:
        self.plan, self.transport, self.directory = plan, transport, directory
        self.outbox = Outbox(plan, parallel.rank, sources, with_digests=verify_digests)
        self._parallel, self._timeout, self._owned = parallel, timeout, owned
        self._verify_digests = verify_digests
        self._failure = failure
        self._version = -1
        device = next(iter(sources.values())).device if sources else torch.device("cpu")
        self._sender = self._open_sender(device)

    @classmethod
    def open(
        cls,
        config: RunConfig,
        chunks: Sequence[GPTModel],
        hf_config: PretrainedConfig,
        parallel: ParallelContext,
        *,
        directory: Path | None = None,
        failure: EngineFailure | None = None,
    ) -> Bridge:
        """The bridge of this run's settings. Collective; no weights move yet.

        Args:
            chunks: this rank's model chunks, unwrapped.
            directory: a private directory is made in it, that trainers and engines must all see.
                None: shared memory on one machine, `run_dir` on several.
            failure: on rank 0: what an engine has failed with; asked while sending.

        Raises:
            ValueError: a parameter that the name tables do not know, or layouts that cannot meet.
            RuntimeError: a rank does not see the directory.
        """
        settings, family = config.resharding, family_for(hf_config)
        parameters = local_parameters(chunks, family, parallel)
        plan = build_plan(
            find_layout(parameters, parallel, len(chunks)),
            EngineLayout.from_config(config),
            family,
            bucket_bytes=settings.bucket_mib * 2**20,
        )
        sources: dict[str, Tensor] = dict(source_parameters(chunks, family, parallel))
        check_agrees(plan, parallel, sources)
        kind: Literal["cpu", "cuda"] = "cuda" if current().type == "cuda" else "cpu"
        if directory is None:
            directory = SHARED_MEMORY if config.on_one_machine else config.run_dir
        owned, path = share_directory(directory, parallel)
        return cls(
            plan,
            sources,
            parallel,
            transport=chosen_transport(config, kind),
            directory=path,
            timeout=timedelta(seconds=settings.timeout_seconds),
            verify_digests=settings.verify_digests,
            owned=owned,
            failure=failure,
        )

    def _open_sender(self, device: torch.device) -> Sender:
        plan, rank, bucket = self.plan, self._parallel.rank, self.plan.bucket_bytes
        trainers, workers = plan.train.world_size, plan.engine.tensor
        replicas = range(plan.engine.replicas)
        if self.transport == "files":
            return FileSender(self.directory, self._agree, leads=rank == LEADER)
        if self.transport == "gloo" or self.transport == "nccl":
            meetings = [
                Meeting(self.directory, r, 0, trainers, workers, self.transport, self._timeout)
                for r in replicas
            ]
            return PointToPointSender(meetings, rank, device, bucket)
        if self.transport == "cuda_ipc":
            boards = [
                NoteBoard(self.directory, r, 0, trainers, workers, self._timeout) for r in replicas
            ]
            return CudaIpcSender(boards, rank, device, bucket)
        raise ValueError(
            f"resharding.transport={self.transport}: moves full tensors by vLLM's own engines, not "
            "messages of a plan; this bridge takes files, gloo, nccl and cuda_ipc"
        )

    def init_info(self, engine: int) -> InitInfo:
        """`init_info` of /init_weight_transfer_engine of one engine. Local."""
        return InitInfo(
            transport=self.transport,
            directory=str(self.directory),
            train_layout=asdict(self.plan.train),
            engine_layout=asdict(self.plan.engine),
            bucket_bytes=self.plan.bucket_bytes,
            fingerprint=self.plan.fingerprint,
            replica=engine,
            timeout_seconds=self._timeout.total_seconds(),
        )

    def prepare(self, version: int) -> UpdatePayload:
        """Publish what can be published before the engines are told; on every rank, `update_info`
        of /update_weights, the same for all engines.

        Raises:
            RuntimeError: on all ranks, if one could not write, or holds what is to be sent in FP8
                and is not finite.
        """
        self._version = version
        self.outbox.start()
        if self.plan.engine.quantization is not None:
            self._find_scales()
        self._sender.prepare(version, self.outbox)
        return self.payload()

    def _find_scales(self) -> None:
        """Before anything is sent in FP8; no engine has been told of the version yet."""
        scales = self.outbox.scales
        scales.find(maxima_over(self._parallel))
        failed = self._numbers_of_ranks(int(scales.unfit is not None))
        scales.check()
        if failed:
            raise RuntimeError(
                f"weights of trainer ranks {list(failed)} hold an infinity or NaN; their logs say "
                "which"
            )

    def payload(self) -> UpdatePayload:
        """`update_info` of the version that was prepared last; for an engine that comes late."""
        payload = new_payload(self._version, self.plan.engine.replicas)
        self._sender.describe(payload)
        return payload

    def send(self, version: int, engines: Sequence[int] | None = None) -> None:
        """Hand the weights to these engines (default all), which are in `update_weights` meanwhile.

        Raises:
            RuntimeError: on all ranks, if an engine did not come to one or did not take its
                messages within the timeout, or failed; the message names it. Rank 0 raises what
                the engine itself said, where it said anything. The next `payload` names a new
                place to meet all these engines.
        """
        if version != self._version:
            raise RuntimeError(f"version {version} is to be sent, {self._version} was prepared")
        chosen = tuple(range(self.plan.engine.replicas) if engines is None else engines)
        if self.transport != "files":
            self.outbox.start()
        failure: Exception | None = None
        try:
            with self._calling_off(chosen) as called_off:
                self._sender.send(version, self.outbox, chosen)
            if called_off.is_set():  # its note stays where they met, and would end the next update
                raise RuntimeError(f"an engine failed before all had taken weights {version}")
        except FAILURES as error:
            failure = error
            clear_frames(error.__traceback__)  # what they hold would keep connections open
            self._sender.call_off(chosen, f"trainer rank {self._parallel.rank} failed: {error}")
            self._sender.rejoin(chosen)  # closes connections: nobody waits for this rank
        failed = self._numbers_of_ranks(int(failure is not None))
        if failed and (said := self._said_by_an_engine()) is not None:
            if failure is None:
                self._sender.rejoin(chosen)
            raise said from failure
        if failure is not None:
            raise failure
        if failed:
            self._sender.rejoin(chosen)
            raise RuntimeError(
                f"trainer rank {next(iter(failed))} could not send weights {version} to the "
                "engines; its log says to which"
            )

    @contextmanager
    def _calling_off(self, engines: tuple[int, ...]) -> Iterator[threading.Event]:
        """Meanwhile nobody waits for these engines once one of them has failed; set: it has."""
        failure, called_off, over = self._failure, threading.Event(), threading.Event()
        if failure is None or self.transport == "files":  # over files nobody waits
            yield called_off
            return

        def watch() -> None:
            while not over.wait(POLL_SECONDS):
                if (said := failure()) is not None:
                    called_off.set()
                    self._sender.call_off(engines, str(said))
                    return

        thread = threading.Thread(target=watch, name="engines that fail", daemon=True)
        thread.start()
        try:
            yield called_off
        finally:
            over.set()
            thread.join()

    def _said_by_an_engine(self) -> BaseException | None:
        """Why an engine failed, by its own words: they may come after its connections went."""
        if self._failure is None:
            return None
        deadline = time.monotonic() + GRACE_SECONDS
        while (said := self._failure()) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return said

    def rejoin(self, engine: int) -> None:
        """An engine has been restarted: `payload` names a new place to meet it. Local."""
        self._sender.rejoin((engine,))

    def expected_digests(self) -> list[dict[str, str]] | None:
        """For each tensor rank of an engine: parameter -> digest in hexadecimal, on rank 0.

        None on other ranks, and everywhere without `resharding.verify_digests`: there is nothing to
        compare. The control group sums one integer for each parameter.
        """
        if not self._verify_digests:
            return None
        workers = range(self.plan.engine.tensor)
        names = [list(self.plan.parameters(worker)) for worker in workers]
        parts: list[int] = []
        for worker in workers:
            mine = self.outbox.partial_digests(worker)
            parts += [mine.get(name, 0) for name in names[worker]]
        sums = torch.tensor(parts, dtype=torch.int64)
        dist.all_reduce(sums, group=self._parallel.control_group)
        if self._parallel.rank != LEADER:
            return None
        values = iter(sums.tolist())
        return [{name: as_hex(next(values)) for name in names[worker]} for worker in workers]

    def acknowledged(self, version: int) -> None:
        """All engines serve the version: files of earlier ones go. Local."""
        self._sender.acknowledged(version)

    def close(self) -> None:
        """Leave all groups and remove the directory; may be called twice. Local."""
        self._sender.close()
        if self._owned is not None:
            self._owned.close()

    @property
    def staging_bytes(self) -> int:
        """Most memory that this rank held beside model and published files, so far."""
        return self._sender.staging_bytes

    def _agree(self, failure: Exception | None) -> None:
        """Raise on all ranks what failed on one; otherwise go on when all have come here."""
        failed = self._numbers_of_ranks(_error_number(failure))
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        if not failed:
            return
        causes = ", ".join(f"rank {r}: {_error_text(number)}" for r, number in failed.items())
        room = (
            f". It must hold two versions of {self.plan.bytes_moved // self.plan.engine.replicas} "
            "bytes; enlarge it, or use another resharding.transport"
        )
        raise RuntimeError(
            f"weights could not be written to {self.directory} ({causes})"
            + (room if errno.ENOSPC in failed.values() else "")
        ) from failure

    def _numbers_of_ranks(self, mine: int) -> dict[int, int]:
        """Rank -> its number, of all whose number is not 0; on every rank, once all are here.

        A rank may send for long, so this waits as long as the control group does; the launcher
        ends the run when one has died.
        """
        numbers = torch.zeros(self._parallel.world_size, dtype=torch.int64)
        numbers[self._parallel.rank] = mine
        dist.all_reduce(numbers, group=self._parallel.control_group)
        return {rank: number for rank, number in enumerate(numbers.tolist()) if number}


def _error_number(failure: Exception | None) -> int:
    """For the other ranks: 0 without one, an errno, or -1: something else."""
    if failure is None:
        return 0
    number = failure.errno if isinstance(failure, OSError) else None
    return number or -1


def _error_text(number: int) -> str:
    return os.strerror(number) if number > 0 else "its log says why"


def share_directory(
    parent: Path, parallel: ParallelContext
) -> tuple[PrivateDirectory | None, Path]:
    """A private directory that all ranks see: (it, on the rank that owns it; its path).

    Collective over the control group.

    Raises:
        RuntimeError: a rank does not see it.
    """
    owned = PrivateDirectory(parent) if parallel.rank == LEADER else None
    name = None
    if owned is not None:
        name = {"path": torch.tensor(list(os.fsencode(owned.path)), dtype=torch.uint8)}
    received = broadcast_tensors(name, src_rank=LEADER, group=parallel.control_group)
    path = Path(os.fsdecode(bytes(received["path"].tolist())))
    if not path.is_dir():
        raise RuntimeError(
            f"rank {parallel.rank} does not see {path}, made by rank {LEADER} for the weights: on "
            "several machines the directory must lie on a shared file system"
        )
    return owned, path
