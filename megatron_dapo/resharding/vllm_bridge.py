"""The trainer's side of a weight update through vLLM's own backends (transports `vllm_*`).

vLLM's trainer-side engines move the weights; each believes that it also tells the engines what to
do. Here the rollouts do that (they pause, compare and resume around it), so its client only checks
that the rollouts were told to say the same, and passes on what could not be known before.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.m2n_common import M2NParamMeta
from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from megatron_dapo.config.resharding_checks import VLLM_BACKENDS, VllmBackend
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.device import current
from megatron_dapo.parallel.collectives import broadcast_tensors, raise_together
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.engine_map import EngineMap
from megatron_dapo.resharding.meeting import LOOPBACK
from megatron_dapo.resharding.messages import DTYPES
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.transport import LEADER, POLL_SECONDS, EngineFailure
from megatron_dapo.resharding.vllm_client import Deliver, ToldEngines
from megatron_dapo.resharding.vllm_source import PolicyShards, PolicySource

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

PACKED_BUFFERS = 2


@dataclass(frozen=True, eq=False)
class TransferGroup:
    """Engines that share a process group with the trainers."""

    engines: tuple[int, ...]
    port: int
    """Where they meet, on loopback; 0: they do not meet (ipc), or this rank need not know yet."""


class VllmBridge:
    """One trainer rank's end, with the surface of `bridge.Bridge`.

    Every rank calls every method, in the same order. No digests come back: vLLM's backends keep
    none, so only the probe tells whether an engine holds the policy.

    Args:
        source: `PolicyShards` for nccl_m2n, else a `PolicySource`.
        workers: tensor ranks of one engine.
        engines: number of engines.
        buffer_bytes: of a packed buffer.
        deliver: on rank 0; needed for ipc, whose update says what was not known before.
        failure: on rank 0: what an engine has failed with; asked while sending.
    """

    directory = None
    """Nothing is published."""

    def __init__(
        self,
        backend: VllmBackend,
        source: WeightSource,
        parallel: ParallelContext,
        *,
        workers: int,
        engines: int,
        buffer_bytes: int,
        timeout: timedelta,
        deliver: Deliver | None = None,
        failure: EngineFailure | None = None,
    ) -> None:
        self.backend, self.source = backend, source
        self._parallel, self._timeout, self._deliver = parallel, timeout, deliver
        self._workers, self._buffer_bytes = workers, buffer_bytes
        self._failure = failure
        self._everyone = tuple(range(engines))
        self._transfer_groups: dict[int, TransferGroup] = {}
        self._senders: dict[TransferGroup, TrainerWeightTransferEngine] = {}
        self._version = -1
        self._meet(self._everyone)

    @classmethod
    def open(
        cls,
        config: RunConfig,
        chunks: Sequence[GPTModel],
        hf_config: PretrainedConfig,
        parallel: ParallelContext,
        *,
        deliver: Deliver | None,
        failure: EngineFailure | None = None,
    ) -> VllmBridge:
        """The bridge of this run's settings. Collective; no weights move yet.

        Raises:
            ValueError: a layout that nccl_m2n cannot describe.
        """
        backend = VLLM_BACKENDS[config.resharding.transport]
        layout, family = EngineLayout.from_config(config), family_for(hf_config)
        # Two buckets of the gather and two packed buffers are two buckets of the settings.
        half = config.resharding.bucket_mib * 2**19
        dtype = DTYPES[layout.dtype]
        source: WeightSource
        if backend == "nccl_m2n":
            source = PolicyShards(chunks, hf_config, parallel, dtype=dtype)
        else:
            source = PolicySource(
                chunks,
                hf_config,
                parallel,
                dtype=dtype,
                bucket_bytes=half,
                in_fp8=EngineMap(family, layout).quantized_tensors(),
                everywhere=backend == "ipc",
            )
        return cls(
            backend,
            source,
            parallel,
            workers=layout.tensor,
            engines=layout.replicas,
            buffer_bytes=half,
            timeout=timedelta(seconds=config.resharding.timeout_seconds),
            deliver=deliver,
            failure=failure,
        )

    def init_info(self, engine: int) -> dict[str, object]:
        """`init_info` of /init_weight_transfer_engine of one engine; rank 0's counts. Ask again
        after every `prepare` and `rejoin`: it names the place to meet."""
        transfer_group = self._transfer_groups[engine]
        first = transfer_group.engines.index(engine) * self._workers
        return self._worker_init(transfer_group, first)

    def prepare(self, version: int) -> dict[str, object]:
        """`update_info` of /update_weights, the same for all engines."""
        self._version = version
        if len(set(self._transfer_groups.values())) > 1:
            self._meet(self._everyone)
        return self.payload()

    def payload(self) -> dict[str, object]:
        """As `prepare` returned it; {}: what there is to say is delivered while sending."""
        metas = self.source.metadata()
        names = [meta.name for meta in metas]
        if self.backend == "ipc":
            return {}
        if self.backend == "nccl_m2n":
            return {"names": names}
        return {
            "names": names,
            "dtype_names": [_dtype_name(meta.dtype) for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
        }

    def send(self, version: int, engines: Sequence[int] | None = None) -> None:
        """Hand the weights to these engines (default all), which are in `update_weights` meanwhile.

        Raises:
            RuntimeError: on all ranks, if vLLM's engine failed on one, or is not done within the
                timeout: it waits for ever for an engine that is gone. The process can then only
                end; so rank 0 does not wait for the others to raise what an engine itself said.
        """
        if version != self._version:
            raise RuntimeError(f"version {version} is to be sent, {self._version} was prepared")
        chosen = self._everyone if engines is None else tuple(engines)
        for transfer_group in dict.fromkeys(self._transfer_groups[engine] for engine in chosen):
            port = {"port": torch.tensor(transfer_group.port)} if self._leads else None
            shared = broadcast_tensors(port, src_rank=LEADER, group=self._parallel.control_group)
            transfer = partial(self._transfer, transfer_group, int(shared["port"]))
            failure = _within(self._timeout, transfer, self._failure)
            raise_together(failure, self._parallel.control_group)

    def rejoin(self, engine: int) -> None:
        """An engine has been restarted: until the next `prepare` it has a group of its own."""
        self._meet((engine,))

    def expected_digests(self) -> None:
        """None: there is nothing to compare."""

    def acknowledged(self, version: int) -> None:
        """All engines serve the version. Nothing is kept for them."""

    def close(self) -> None:
        """Leave all groups; may be called twice. Local."""
        for transfer_group in list(self._senders):
            self._senders.pop(transfer_group).shutdown()

    @property
    def staging_bytes(self) -> int:
        """Most memory that a rank may hold beside the model: by the settings, not measured."""
        if self.backend == "nccl_m2n":
            return 0
        return 2 * PACKED_BUFFERS * self._buffer_bytes if self._senders else 0

    @property
    def _leads(self) -> bool:
        return self._parallel.rank == LEADER

    def _meet(self, engines: tuple[int, ...]) -> None:
        """Give these engines a new place; groups that they alone were in are left."""
        port = _free_port() if self._leads and self.backend != "ipc" else 0
        transfer_group = TransferGroup(engines, port)
        self._transfer_groups |= dict.fromkeys(engines, transfer_group)
        for old in [old for old in self._senders if old not in self._transfer_groups.values()]:
            self._senders.pop(old).shutdown()

    def _transfer(self, transfer_group: TransferGroup, port: int) -> None:
        if transfer_group not in self._senders:
            told = None
            if self._leads:
                told = self._worker_init(transfer_group, 0), self.payload()
            self._senders[transfer_group] = WeightTransferTrainerFactory.trainer_init(
                self._trainer_init(transfer_group, port),
                client=ToldEngines(told, self._deliver),
                source=self.source,
            )
        self._senders[transfer_group].send_weights()

    def _first_worker(self) -> int:
        """Rank of the first engine's first worker: after the trainers that take part."""
        return self._parallel.world_size if self.backend == "nccl_m2n" else 1

    def _group_size(self, transfer_group: TransferGroup) -> int:
        return self._first_worker() + len(transfer_group.engines) * self._workers

    def _worker_init(self, transfer_group: TransferGroup, first: int) -> dict[str, object]:
        """What vLLM's worker-side engine is initialised with.

        Args:
            first: of the workers of all engines, the first one of this engine.
        """
        if self.backend == "ipc":
            return {"packed": True}
        place: dict[str, object] = {
            "master_address": LOOPBACK,
            "master_port": transfer_group.port,
            "rank_offset": self._first_worker() + first,
            "world_size": self._group_size(transfer_group),
        }
        if self.backend == "nccl":
            return place | {
                "packed": True,
                "packed_buffer_size_bytes": self._buffer_bytes,
                "packed_num_buffers": PACKED_BUFFERS,
            }
        assert isinstance(self.source, PolicyShards), "nccl_m2n sends shards"
        metas = [meta for meta in self.source.metadata() if isinstance(meta, M2NParamMeta)]
        return place | {
            "src_mesh_dims": list(self.source.mesh().dims),
            "dst_mesh_dims": list(self._destination_mesh(transfer_group)),
            "names": [meta.name for meta in metas],
            "dtype_names": [_dtype_name(meta.dtype) for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
            "src_placements": [m.placements and list(m.placements) for m in metas],
        }

    def _destination_mesh(self, transfer_group: TransferGroup) -> tuple[int, int]:
        return len(transfer_group.engines), self._workers

    def _trainer_init(self, transfer_group: TransferGroup, port: int) -> TrainerInitInfo:
        rank = self._parallel.rank
        if self.backend == "ipc":
            return IPCTrainerInitInfo(
                rank=rank, packed=True, packed_buffer_size_bytes=self._buffer_bytes
            )
        if self.backend == "nccl":
            return NCCLTrainerInitInfo(
                rank=rank,
                master_address=LOOPBACK,
                master_port=port,
                world_size=self._group_size(transfer_group),
                packed=True,
                packed_buffer_size_bytes=self._buffer_bytes,
                packed_num_buffers=PACKED_BUFFERS,
            )
        return M2NTrainerInitInfo(
            rank=rank,
            master_address=LOOPBACK,
            master_port=port,
            world_size=self._group_size(transfer_group),
            num_trainer_ranks=self._parallel.world_size,
            dst_mesh_dims=self._destination_mesh(transfer_group),
        )


def _within(
    timeout: timedelta, work: Callable[[], None], engine_failure: EngineFailure | None
) -> RuntimeError | None:
    """Run it in a thread of its own, because nothing ends an NCCL call whose peer is gone.

    Returns:
        What went wrong; where it takes longer, it is left running.

    Raises:
        BaseException: what an engine failed with meanwhile; the work is left running.
    """
    device = current()  # a new thread would start on the first one
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with torch.no_grad():
                work()
        finally:
            outcome.append(sys.exc_info()[1])

    thread = threading.Thread(target=run, name="weight transfer of vLLM", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout.total_seconds()
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, POLL_SECONDS))
        if engine_failure is not None and (said := engine_failure()) is not None:
            raise said
    if not outcome:
        return RuntimeError(
            f"vLLM's weight transfer is not done after {timeout.total_seconds():g} s "
            "(resharding.timeout_seconds): an engine did not come, or died"
        )
    if outcome[0] is not None:
        failure = RuntimeError(f"vLLM's weight transfer failed: {outcome[0]}")
        failure.__cause__ = outcome[0]
        return failure
    return None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        return port
