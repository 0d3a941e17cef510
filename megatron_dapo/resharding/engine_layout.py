"""The engines of a run as a plan sees them: how many ranks, and in what they keep the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_dapo.config.schema import RunConfig
from megatron_dapo.resharding.block_grid import SCALE_BYTES, Content

Dtype = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """The grid of engine ranks: engine rank = replica * tensor + tensor rank."""

    tensor: int = 1
    replicas: int = 1
    """Engines with the same weights; what one gets, all get."""
    expert_parallel: bool = False
    """Experts are whole, spread over the tensor ranks (--enable-expert-parallel)."""
    dtype: Dtype = "bfloat16"
    """Of the engine's parameters, and of what is sent, but for FP8 matrices."""
    quantization: Literal["fp8"] | None = None
    """fp8: matrices of the layers are e4m3 with a scale for each block; so they are sent."""

    @classmethod
    def from_config(cls, config: RunConfig) -> EngineLayout:
        """The engines of a run."""
        rollout = config.rollout
        return cls(
            tensor=rollout.engine_tensor,
            replicas=rollout.engines,
            dtype=config.engine_dtype,
            quantization=rollout.engine_quantization,
        )

    def __post_init__(self) -> None:
        for name, size in (("engine_tensor", self.tensor), ("engines", self.replicas)):
            if size < 1:
                raise ValueError(f"rollout.{name}={size}: must be at least 1")

    @property
    def world_size(self) -> int:
        return self.tensor * self.replicas

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def bytes_of(self, content: Content) -> int:
        """Bytes of one number."""
        return {"plain": self.item_bytes, "values": 1, "scales": SCALE_BYTES}[content]
