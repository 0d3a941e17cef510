"""Which rank holds which shard of which parameter.

Everything follows from the sizes of the parallel grid; the ranks exchange their places once,
a dozen integers each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.resharding.cuts import shard_bounds
from megatron_dapo.resharding.name_map import Entry, Family
from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.train_map import experts_per_rank, global_expert, stage_layers

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


@dataclass(frozen=True)
class Layout:
    """The grid of all trainer ranks."""

    tp_size: int
    etp_size: int
    stage_of_layer: Mapping[int, int]
    pp_size: int
    experts_per_rank: int
    padded_vocab_size: int
    dense: Mapping[tuple[int, int], int]
    """(pp_rank, tp_rank) -> global rank that speaks for all its copies."""
    expert: Mapping[tuple[int, int, int], int]
    """(pp_rank, ep_rank, etp_rank) -> global rank that speaks for all its copies."""

    def shards(self, entry: Entry) -> int:
        """Into how many shards a parameter is cut."""
        if entry.rule.cut.dim is None:
            return 1
        return self.tp_size if entry.expert is None else self.etp_size

    def holders(self, entry: Entry) -> list[int]:
        """Global rank that sends each shard of a parameter, in the order of the shards."""
        stage = {"first_stage": 0, "last_stage": self.pp_size - 1}.get(entry.rule.where)
        if stage is None:
            assert entry.layer is not None, f"{entry.rule.megatron} lies in no layer"
            stage = self.stage_of_layer[entry.layer]
        if entry.expert is None:
            return [self.dense[stage, tp_rank] for tp_rank in range(self.shards(entry))]
        ep_rank = entry.expert // self.experts_per_rank
        return [self.expert[stage, ep_rank, etp_rank] for etp_rank in range(self.shards(entry))]

    def slices(self, entry: Entry, index: int) -> list[slice]:
        """What shard `index` covers of each Hugging Face tensor, along the divided dimension."""
        cut = entry.rule.cut
        if cut.dim is None:
            return [slice(0, tensor.shape[0]) for tensor in entry.hf]
        padded = self.padded_vocab_size if cut.padded else None
        return [
            shard_bounds(tensor.shape[cut.dim], self.shards(entry), index, padded)
            for tensor in entry.hf
        ]

    def local_shape(self, entry: Entry) -> tuple[int, ...]:
        """Shape of the parameter on each rank that holds a shard of it."""
        cut, (first, *_) = entry.rule.cut, entry.hf
        if cut.padded:
            return (self.padded_vocab_size // self.tp_size, *first.shape[1:])
        if cut.dim == 1:
            return (first.shape[0], first.shape[1] // self.shards(entry))
        rows = sum(tensor.shape[0] for tensor in entry.hf) // self.shards(entry)
        return (rows, *first.shape[1:])


def exchange_layout(
    parameters: Mapping[Entry, Parameter], family: Family, parallel: ParallelContext, chunks: int
) -> Layout:
    """The places of all ranks, on every rank.

    Every trainer rank calls it; the world group gathers eight integers of each.
    """
    vocab_rows = [p.shape[0] for e, p in parameters.items() if e.rule.cut.padded]
    device = next(iter(parameters.values())).device
    mine = torch.tensor(
        [
            parallel.rank,
            parallel.pp_rank,
            parallel.tp_rank,
            parallel.dp_cp_group.rank(),
            parallel.ep_rank,
            parallel.etp_rank,
            parallel.expert_dp_rank,
            vocab_rows[0] if vocab_rows else 0,
        ],
        dtype=torch.int64,
        device=device,
    )
    gathered: list[Tensor] = [torch.empty_like(mine) for _ in range(parallel.world_size)]
    dist.all_gather(gathered, mine, group=parallel.world_group)
    dense: dict[tuple[int, int], int] = {}
    expert: dict[tuple[int, int, int], int] = {}
    most_rows = 0
    for rank, pp, tp, dp, ep, etp, expert_dp, rows in (place.tolist() for place in gathered):
        most_rows = max(most_rows, rows)
        if dp == 0:
            dense[pp, tp] = rank
        if expert_dp == 0:
            expert[pp, ep, etp] = rank
    stages = stage_layers(family.num_layers, parallel.pp_size, chunks)
    return Layout(
        tp_size=parallel.tp_size,
        etp_size=parallel.etp_size,
        pp_size=parallel.pp_size,
        stage_of_layer={
            layer: stage
            for stage, ranges in enumerate(stages)
            for layers in ranges
            for layer in layers
        },
        experts_per_rank=experts_per_rank(family.num_experts, parallel.ep_size),
        padded_vocab_size=most_rows * parallel.tp_size,
        dense=dense,
        expert=expert,
    )


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
    train, rank = plan.train, parallel.rank
    if parallel.world_size != train.world_size:
        raise RuntimeError(
            f"the plan was made for {train.world_size} trainer ranks, {parallel.world_size} are "
            "running; start the ranks with the layout that the plan was made for"
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
                f"plan takes it for number {planned[key][0]} of {planned[key][1]}; start the ranks "
                "with the layout that the plan was made for"
            )
    shapes = plan.sources(rank)
    for key in sorted(shapes.keys() | sources.keys()):
        seen_shape = tuple(sources[key].shape) if key in sources else None
        if seen_shape != shapes.get(key):
            raise RuntimeError(
                f"the parameter of {key} has shape {seen_shape} on rank {rank}, the plan expects "
                f"{shapes.get(key)} (None: no such parameter); build model and plan from one "
                "configuration"
            )
