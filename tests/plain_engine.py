"""Engine workers without vLLM: plain tensors of vLLM's names, written by the receiving code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

import torch
import transformers
from torch import Tensor

from megatron_dapo.resharding.messages import DTYPES, dtype_of
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import EngineLayout, ReshardPlan, TrainLayout, build_plan
from megatron_dapo.resharding.receive import PlannedWeights
from megatron_dapo.resharding.receivers import open_receiver
from megatron_dapo.resharding.transport import InitInfo


class PlainPart:
    """All parameters of one worker, live."""

    way: Literal["live"] = "live"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    @property
    def targets(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.tensors.items()}

    def open(self) -> Mapping[str, Tensor]:
        return self.tensors

    def close(self) -> None:
        """Nothing to bring into another layout."""


class PlainWorker:
    """One tensor rank of one engine; `init_info` goes through JSON, as over HTTP."""

    def __init__(
        self, init: InitInfo, hf_config: transformers.PretrainedConfig, tensor_rank: int
    ) -> None:
        init = json.loads(json.dumps(init))
        self.plan = plan_of_init(init, hf_config)
        dtype = DTYPES[self.plan.engine.dtype]
        self.tensors = {
            name: torch.full(shape, float("nan")).to(dtype_of(self.plan.content(name), dtype))
            for name, shape in self.plan.parameters(tensor_rank).items()
        }
        receiver = open_receiver(init, self.plan, tensor_rank, torch.device("cpu"))
        parts = [PlainPart(self.tensors)]
        self.weights = PlannedWeights(self.plan, tensor_rank, parts, receiver)


def plan_of_init(init: InitInfo, hf_config: transformers.PretrainedConfig) -> ReshardPlan:
    """The trainer's plan, from what an engine is told."""
    return build_plan(
        TrainLayout(**init["train_layout"]),
        EngineLayout(**init["engine_layout"]),  # type: ignore[arg-type]
        family_for(hf_config),
        bucket_bytes=init["bucket_bytes"],
    )


def vllm_tensors(
    stored: Mapping[str, Tensor], hf_config: transformers.PretrainedConfig, tp: int, rank: int
) -> dict[str, Tensor]:
    """What vLLM's weight loaders make of Hugging Face tensors on one tensor rank."""
    from tests.unit.resharding.layouts import Case, vllm_parameters

    case = Case(
        hf_config, TrainLayout(padded_vocab_size=1), EngineLayout(tensor=tp), bucket_bytes=1
    )
    return vllm_parameters(case, dict(stored), rank)
