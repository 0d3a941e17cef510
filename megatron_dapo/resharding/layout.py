"""Which rank holds which shard of which parameter.

Everything follows from the sizes of the parallel grid (`train_map`); here they meet the model and
the process groups that Megatron built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.resharding.name_map import Entry, Family
from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.train_map import (
    TrainLayout,
    experts_per_rank,
    global_expert,
    stage_layers,
)

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def local_parameters(
    chunks: Sequence[GPTModel], family: Family, parallel: ParallelContext
) -> dict[Entry, Parameter]:
    """Every parameter of this rank's chunks under the entry that names it.

    Any rank may call it alone; nothing is communicated. Called at start-up, it refuses a model
    that could not be kept in step with the engines.

    Raises:
        ValueError: a parameter that no rule names.
        RuntimeError: the chunks hold other layers or parameters than the layout says.
    """
    per_rank = experts_per_rank(family.num_experts, parallel.ep_size)
    first_expert = global_expert(parallel.ep_rank, per_rank, 0)
    layers_of = stage_layers(family.num_layers, parallel.pp_size, len(chunks))[parallel.pp_rank]
    found: dict[Entry, Parameter] = {}
    for chunk, layers in zip(chunks, layers_of, strict=True):
        built = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        if built != list(layers):
            raise RuntimeError(
                f"pipeline stage {parallel.pp_rank} was built with layers {built}, "
                f"its place in the layout has {list(layers)}"
            )
        _check_router_biases(chunk)
        for name, parameter in chunk.named_parameters():
            entry = family.find(name, layers, first_expert)
            if entry in found:
                raise RuntimeError(f"{name!r} names a parameter that another one names already")
            found[entry] = parameter
    _check_complete(
        found, family, parallel, layers_of, range(first_expert, first_expert + per_rank)
    )
    return found


def _check_router_biases(chunk: nn.Module) -> None:
    """No family has a bias of the router; as a buffer it would be missed without a word."""
    for name, _ in chunk.named_buffers():
        if name.endswith("router.expert_bias"):
            raise ValueError(
                f"model buffer {name!r} steers the routing and has no Hugging Face name in the "
                "table of this family: engines would route without it. Build the model with "
                "moe_router_enable_expert_bias=False"
            )


def _check_complete(
    found: Mapping[Entry, Parameter],
    family: Family,
    parallel: ParallelContext,
    layers_of: Sequence[range],
    experts: range,
) -> None:
    mine = {layer for layers in layers_of for layer in layers}
    for entry in family.entries:
        here = {
            "first_stage": parallel.is_first_stage,
            "last_stage": parallel.is_last_stage,
            "layer": entry.layer in mine and (entry.expert is None or entry.expert in experts),
        }[entry.rule.where]
        if here and entry.rule.exported and entry not in found:
            raise RuntimeError(
                f"the model on rank {parallel.rank} has no parameter "
                f"{' or '.join(entry.rule.megatron)} for layer {entry.layer}; the configuration "
                f"of the model says it holds {', '.join(t.name for t in entry.hf)}"
            )


def shard_place(entry: Entry, parallel: ParallelContext) -> tuple[int, int]:
    """(number of shards, which one this rank holds) of a parameter."""
    if entry.rule.cut.dim is None:
        return 1, 0
    if entry.expert is not None:
        return parallel.etp_size, parallel.etp_rank
    return parallel.tp_size, parallel.tp_rank


def find_layout(
    parameters: Mapping[Entry, Parameter], parallel: ParallelContext, chunks: int
) -> TrainLayout:
    """The grid of all trainer ranks, on every rank.

    Every trainer rank calls it; the world group exchanges one integer, the rows of the vocabulary
    that a rank holds (none in the middle of a pipeline).

    Raises:
        RuntimeError: this rank sits elsewhere in Megatron's groups than in the grid.
    """
    here = [p.shape[0] for e, p in parameters.items() if e.rule.cut.padded]
    device = next(iter(parameters.values())).device
    rows = torch.tensor(max(here, default=0), dtype=torch.int64, device=device)
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=parallel.world_group)
    train = TrainLayout(
        tensor=parallel.tp_size,
        pipeline=parallel.pp_size,
        virtual_pipeline=chunks,
        context=parallel.cp_size,
        data=parallel.dp_size,
        expert=parallel.ep_size,
        expert_tensor=parallel.etp_size,
        padded_vocab_size=int(rows) * parallel.tp_size,
    )
    _check_place(train, parallel)
    return train


def source_parameters(
    chunks: Sequence[GPTModel], family: Family, parallel: ParallelContext
) -> dict[str, Parameter]:
    """`Entry.key` -> parameter of this rank, without copies that another rule exports.

    Any rank may call it alone; nothing is communicated.

    Raises:
        ValueError: a parameter that no rule names.
        RuntimeError: the chunks hold other layers or parameters than the layout says.
    """
    found = local_parameters(chunks, family, parallel)
    return {entry.key: value for entry, value in found.items() if entry.rule.exported}


def check_agrees(
    plan: ReshardPlan, parallel: ParallelContext, sources: Mapping[str, Tensor]
) -> None:
    """Refuse to send by a plan that was made for other ranks than these.

    Any rank may call it alone; nothing is communicated.

    Args:
        sources: this rank's `source_parameters`.

    Raises:
        RuntimeError: the rank sits elsewhere in Megatron's groups than the plan thinks, or holds
            other parameters; the message names the dimension or the parameter.
    """
    _check_place(plan.train, parallel)
    shapes = plan.sources(parallel.rank)
    for key in sorted(shapes.keys() | sources.keys()):
        seen_shape = tuple(sources[key].shape) if key in sources else None
        if seen_shape != shapes.get(key):
            raise RuntimeError(
                f"the parameter of {key} has shape {seen_shape} on rank {parallel.rank}, the plan "
                f"expects {shapes.get(key)} (None: no such parameter); build model and plan from "
                "one configuration"
            )


def _check_place(train: TrainLayout, parallel: ParallelContext) -> None:
    """The rank is in Megatron's groups where the grid has it. Local."""
    rank = parallel.rank
    if parallel.world_size != train.world_size:
        raise RuntimeError(
            f"the layout is made for {train.world_size} trainer ranks, {parallel.world_size} are "
            "running; start as many as the layout has"
        )
    place = train.coordinates(rank)
    found = {
        "parallel.tensor": (parallel.tp_rank, parallel.tp_size),
        "parallel.pipeline": (parallel.pp_rank, parallel.pp_size),
        "parallel.context": (parallel.cp_rank, parallel.cp_size),
        "parallel.data": (parallel.dp_rank, parallel.dp_size),
        "parallel.expert": (parallel.ep_rank, parallel.ep_size),
        "parallel.expert_tensor": (parallel.etp_rank, parallel.etp_size),
    }
    planned = {
        "parallel.tensor": (place.tensor, train.tensor),
        "parallel.pipeline": (place.pipeline, train.pipeline),
        "parallel.context": (place.context, train.context),
        "parallel.data": (place.data, train.data),
        "parallel.expert": (place.expert, train.expert),
        "parallel.expert_tensor": (place.expert_tensor, train.expert_tensor),
    }
    for key, seen in found.items():
        if seen != planned[key]:
            raise RuntimeError(
                f"{key}: rank {rank} is number {seen[0]} of {seen[1]} in its process group, the "
                f"layout takes it for number {planned[key][0]} of {planned[key][1]}; start the "
                "ranks with the layout that they were planned for"
            )
