"""The servers that trainer rank 0 starts, and the devices that each of them sees."""

from __future__ import annotations

from megatron_dapo.config import RunConfig
from megatron_dapo.rollout.server_options import Device, server_options
from megatron_dapo.rollout.vllm_server import VllmServer


def own_servers(config: RunConfig, device: Device) -> list[VllmServer]:
    """Our own engines, not started; none where the configuration names running ones."""
    if config.rollout.endpoints:
        return []
    return [
        VllmServer(
            server_options(
                config, index, device=device, visible_devices=_devices(config, device, index)
            )
        )
        for index in range(config.rollout.engines)
    ]


def _devices(config: RunConfig, device: Device, index: int) -> tuple[int, ...]:
    """CUDA devices that one engine sees; it works on the first `engine_tensor` of them.

    Among the trainers' own it sees all those of this machine, since it may map what any trainer
    here has packed (cuda_ipc). Otherwise it sees its own only, which come after the trainers'.
    """
    if device == "cpu":
        return ()
    tensor, trainers = config.rollout.engine_tensor, config.parallel.world_size
    first = index * tensor
    if config.rollout.placement == "disaggregated":
        return tuple(range(trainers + first, trainers + first + tensor))
    here = trainers // config.parallel.nodes
    return (*range(first, here), *range(first))
