"""The bridge that `resharding.transport` asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from transformers import PretrainedConfig

from megatron_dapo.config.resharding_checks import VLLM_BACKENDS
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.resharding.bridge import Bridge
from megatron_dapo.resharding.free_space import check_free_space
from megatron_dapo.resharding.transport import EngineFailure

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class WeightBridge(Protocol):
    """One trainer rank's end of a weight update; every rank calls every method, in this order.

    Parameters are read by `prepare` or `send`: no optimizer step may run before both have returned.
    """

    @property
    def directory(self) -> Path | None:
        """Holds published weights and goes with the bridge; None: there is none."""

    def prepare(self, version: int) -> Mapping[str, object]:
        """Publish what can be; `update_info` for the engines."""

    def init_info(self, engine: int) -> Mapping[str, object]:
        """`init_info` for an engine. Counts on rank 0, after `prepare` or `rejoin`."""

    def payload(self) -> Mapping[str, object]:
        """As `prepare` returned it, or for an engine that has come back since."""

    def send(self, version: int, engines: Sequence[int] | None = None) -> None:
        """Hand the weights to these engines (default all), which wait for them meanwhile."""

    def expected_digests(self) -> list[dict[str, str]] | None:
        """For each tensor rank of an engine, on rank 0; None: there is nothing to compare."""

    def acknowledged(self, version: int) -> None:
        """All engines serve the version."""

    def rejoin(self, engine: int) -> None:
        """An engine has been restarted."""

    def close(self) -> None:
        """Leave all groups, remove the directory; may be called twice."""

    @property
    def staging_bytes(self) -> int:
        """Most memory that this rank held beside model and published files."""


def open_bridge(
    config: RunConfig,
    chunks: Sequence[GPTModel],
    hf_config: PretrainedConfig,
    parallel: ParallelContext,
    *,
    deliver: Callable[[Mapping[str, object]], None] | None = None,
    failure: EngineFailure | None = None,
) -> WeightBridge:
    """The bridge of this run's settings. Collective; no weights move yet.

    Args:
        chunks: this rank's model chunks, unwrapped.
        deliver: on rank 0: posts one more `update_info` to all engines of the open update.
        failure: on rank 0: what an engine of the open update has failed with, None so far; asked
            while weights are sent, so that nobody waits for an engine that refused.

    Raises:
        ValueError: a parameter that the name tables do not know, layouts that cannot meet, or a
            file system that is too small for the weights.
        RuntimeError: a rank does not see the directory of the weights.
    """
    if config.resharding.transport in VLLM_BACKENDS:
        from megatron_dapo.resharding.vllm_bridge import VllmBridge

        return VllmBridge.open(
            config, chunks, hf_config, parallel, deliver=deliver, failure=failure
        )
    bridge = Bridge.open(config, chunks, hf_config, parallel, failure=failure)
    if bridge.transport == "files":
        check_free_space(bridge.directory, bridge.plan)
    return bridge
