"""Loaded by vLLM in each of its processes (entry point `vllm.general_plugins`).

Registers the weight-transfer backend "megatron_dapo" through vLLM's own registry. An update comes
by a plan, as messages that are written into the parameters. Nothing of vLLM is patched, and nothing
else of this package imports this module, so that the package works without vLLM.
"""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.messages import DTYPES
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import build_plan
from megatron_dapo.resharding.receive import PlannedWeights, UpdateState
from megatron_dapo.resharding.receivers import open_receiver
from megatron_dapo.resharding.train_map import TrainLayout
from megatron_dapo.resharding.transport import InitInfo, UpdatePayload

BACKEND = "megatron_dapo"
GUARDED = "MEGATRON_DAPO_GUARDED"
"""Environment variable of servers that we started: their processes die with their parents."""
PR_SET_PDEATHSIG = 1
PLAIN_CACHES = ("auto", "float32", "bfloat16", "float16")
"""Dtypes of the KV cache that need no scales."""


def register() -> None:
    """Make the backend known to this vLLM process; safe to call again."""
    if os.environ.get(GUARDED) == "1":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, PolicyEngine)


@dataclass
class PolicyInit(WeightTransferInitInfo):
    """`init_info` of /init_weight_transfer_engine: the fields of `transport.InitInfo`."""

    transport: str
    directory: str
    train_layout: dict[str, int]
    engine_layout: dict[str, int | bool | str | None]
    bucket_bytes: int
    fingerprint: str
    replica: int
    timeout_seconds: float


@dataclass
class PolicyUpdate(WeightTransferUpdateInfo):
    """`update_info` of /update_weights: the fields of `transport.UpdatePayload`."""

    policy_version: int
    folder: str
    generations: list[int]


class PolicyEngine(WeightTransferEngine[PolicyInit, PolicyUpdate]):
    """Engine side of the transfer, one in each worker."""

    init_info_cls = PolicyInit
    update_info_cls = PolicyUpdate
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.state = UpdateState()
        self.planned: PlannedWeights | None = None

    def init_transfer_engine(self, init_info: PolicyInit) -> None:
        """Learn where weights come from; a second call forgets the first.

        Raises:
            ValueError: the plan does not fit this engine; the message names what differs.
        """
        if not Path(init_info.directory).is_dir():
            raise ValueError(
                f"weights directory {init_info.directory!r} does not exist here; trainers and "
                "engines must share it"
            )
        self.shutdown()
        if self.state.interrupted:  # else the plan would find modules that are half unpacked
            self._give_up()
        self.planned = self._plan(cast(InitInfo, asdict(init_info)))

    def start_weight_update(self) -> None:
        """Announce an update; parameters stay as they are until it comes."""
        if self.state.interrupted:
            self._give_up()
        self.state.start()

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Take an update (the base class would also wait for an accelerator)."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: PolicyUpdate) -> None:
        """One whole update, by the plan."""
        if self.planned is None:
            raise RuntimeError(
                "update_weights before init_weight_transfer_engine: send the trainer's layout first"
            )
        if self.state.interrupted:
            self._give_up()
        self.state.begin(update_info.policy_version)
        self.planned.receive(
            UpdatePayload(
                policy_version=update_info.policy_version,
                folder=update_info.folder,
                generations=update_info.generations,
            )
        )
        self.state.received()

    def finish_weight_update(self) -> None:
        """The engine may serve the new weights.

        Raises:
            RuntimeError: the update failed or is incomplete.
        """
        self.state.finish()

    def shutdown(self) -> None:
        """Leave the trainers."""
        if self.planned is not None:
            self.planned.close()
        self.planned = None

    def _give_up(self) -> None:
        """After an update that broke off: all modules in a layout that a new one can start from."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def _plan(self, init: InitInfo) -> PlannedWeights:
        from megatron_dapo.resharding.vllm_layers import find_parts

        layout = EngineLayout(**init["engine_layout"])  # type: ignore[arg-type]
        self._check_layout(layout, init["replica"])
        self._check_cache()
        plan = build_plan(
            TrainLayout(**init["train_layout"]),
            layout,
            family_for(self.model_config.hf_config),
            bucket_bytes=init["bucket_bytes"],
        )
        tensor_rank = self.parallel_config.rank
        receiver = open_receiver(init, plan, tensor_rank, self.device)
        parts = find_parts(self.model, self.model_config, plan, tensor_rank, self.device)
        return PlannedWeights(plan, tensor_rank, parts, receiver)

    def _check_layout(self, layout: EngineLayout, replica: int) -> None:
        here = self.parallel_config
        found: dict[str, tuple[object, object]] = {
            "tensor ranks": (layout.tensor, here.tensor_parallel_size),
            "pipeline ranks": (1, here.pipeline_parallel_size),
            "data-parallel ranks": (1, here.data_parallel_size),
            "expert parallelism": (layout.expert_parallel, here.enable_expert_parallel),
            "dtype": (DTYPES[layout.dtype], self.model_config.dtype),
            "quantization": (layout.quantization, self.model_config.quantization),
            "replica below their number": (True, replica < layout.replicas),
        }
        for what, (planned, real) in found.items():
            if planned != real:
                raise ValueError(
                    f"the trainer's plan is for an engine with {what} {planned}, this one has "
                    f"{real}; start the engine with the settings of the run"
                )

    def _check_cache(self) -> None:
        """Scales of keys and values follow from the weights, but do not come with them."""
        dtype = self.vllm_config.cache_config.cache_dtype
        if dtype not in PLAIN_CACHES:
            raise ValueError(
                f"this engine keeps its KV cache as {dtype}, whose scales would be of the weights "
                f"that it started with after every update; allowed are {', '.join(PLAIN_CACHES)}: "
                "start it with --kv-cache-dtype auto"
            )
