"""One object that knows every process group and this rank's place in it.

Megatron keeps its groups in module globals. They are read once, here; the rest of the package
gets a `ParallelContext` as an argument.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_dapo.config.schema import ParallelConfig
from megatron_dapo.device import install_cpu_support

install_cpu_support()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

CONTROL_TIMEOUT = timedelta(days=1)
"""Longest wait of the trainers for rollouts, which are bounded by their own limits."""
STAGE_SEED_STEP = 100
"""Distance between the seeds of two pipeline stages (Megatron's)."""


@dataclass(frozen=True)
class ParallelContext:
    """Process groups of one trainer rank (tp x pp x cp x dp, experts cut across tp x cp x dp)."""

    tp_group: ProcessGroup
    pp_group: ProcessGroup
    cp_group: ProcessGroup
    dp_group: ProcessGroup
    dp_cp_group: ProcessGroup
    """Ranks with the same weights and different tokens: losses and gradients sum over it."""
    tp_pp_group: ProcessGroup
    """Ranks that together hold the model's dense weights once."""
    ep_group: ProcessGroup
    etp_group: ProcessGroup
    expert_dp_group: ProcessGroup
    world_group: ProcessGroup | None
    control_group: ProcessGroup
    """All ranks over gloo with a long timeout: CPU tensors, and waiting for rollouts."""

    @classmethod
    def create(cls, config: ParallelConfig, *, seed: int) -> ParallelContext:
        """Build all groups and seed the random states.

        Every rank calls it, after `launch_env.init_process_group`. Communicates: group creation
        only. Afterwards Megatron's parallel_state is initialised too; `destroy` undoes both.

        Args:
            config: sizes; their product must be the world size.
            seed: of weight initialisation and dropout; tensor ranks and stages derive their own.

        Raises:
            ValueError: sizes and world size do not fit.
        """
        _check_sizes(config, dist.get_world_size())
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor,
            pipeline_model_parallel_size=config.pipeline,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline,
            context_parallel_size=config.context,
            expert_model_parallel_size=config.expert,
            expert_tensor_parallel_size=config.expert_tensor_size,
            distributed_timeout_minutes=math.ceil(config.timeout_seconds / 60),
        )
        context = cls(
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            pp_group=parallel_state.get_pipeline_model_parallel_group(),
            cp_group=parallel_state.get_context_parallel_group(),
            dp_group=parallel_state.get_data_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            tp_pp_group=parallel_state.get_model_parallel_group(),
            ep_group=parallel_state.get_expert_model_parallel_group(),
            etp_group=parallel_state.get_expert_tensor_parallel_group(),
            expert_dp_group=parallel_state.get_expert_data_parallel_group(),
            world_group=dist.group.WORLD,
            control_group=dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT),
        )
        stage_seed = seed + STAGE_SEED_STEP * context.pp_rank
        torch.manual_seed(stage_seed)
        tensor_parallel.model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)
        return context

    def destroy(self) -> None:
        """End all groups; torch.distributed's default group stays. Every rank calls it.

        Megatron forgets most of its groups without ending them, and models hold theirs in
        reference cycles; with gloo each keeps threads that slow down whoever comes next.
        """
        for group in (*(parallel_state._global_process_group_list or ()), self.control_group):
            if group is not None:
                dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
        gc.collect()

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def tp_rank(self) -> int:
        return self.tp_group.rank()

    @property
    def tp_size(self) -> int:
        return self.tp_group.size()

    @property
    def pp_rank(self) -> int:
        return self.pp_group.rank()

    @property
    def pp_size(self) -> int:
        return self.pp_group.size()

    @property
    def cp_rank(self) -> int:
        return self.cp_group.rank()

    @property
    def cp_size(self) -> int:
        return self.cp_group.size()

    @property
    def dp_rank(self) -> int:
        return self.dp_group.rank()

    @property
    def dp_size(self) -> int:
        return self.dp_group.size()

    @property
    def ep_rank(self) -> int:
        return self.ep_group.rank()

    @property
    def ep_size(self) -> int:
        return self.ep_group.size()

    @property
    def etp_rank(self) -> int:
        return self.etp_group.rank()

    @property
    def etp_size(self) -> int:
        return self.etp_group.size()

    @property
    def expert_dp_rank(self) -> int:
        return self.expert_dp_group.rank()

    @property
    def expert_dp_size(self) -> int:
        return self.expert_dp_group.size()

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the output layer; log-probs and losses exist only here."""
        return self.pp_rank == self.pp_size - 1


def _check_sizes(config: ParallelConfig, world_size: int) -> None:
    if config.world_size != world_size:
        raise ValueError(
            f"parallel.tensor={config.tensor} x pipeline={config.pipeline} x "
            f"context={config.context} x data={config.data} = {config.world_size} ranks, but "
            f"{world_size} were started. Start one rank per device of the layout."
        )
    experts = config.expert * config.expert_tensor_size * config.pipeline
    if world_size % experts:
        raise ValueError(
            f"parallel.expert={config.expert} x expert_tensor={config.expert_tensor_size} x "
            f"pipeline={config.pipeline} = {experts} does not divide {world_size} ranks."
        )
    if config.virtual_pipeline is not None and config.pipeline < 2:
        raise ValueError(
            f"parallel.virtual_pipeline={config.virtual_pipeline} needs parallel.pipeline >= 2, "
            f"it is {config.pipeline}. Leave virtual_pipeline unset for one stage."
        )
