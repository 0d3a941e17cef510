"""Collectives that training needs beside Megatron's: named tensors, and sequences under CP."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config import ConfigError
from megatron_dapo.config.errors import RunFailed

ValueT = TypeVar("ValueT")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int32, torch.int64,
        torch.bfloat16, torch.float16, torch.float32, torch.float64,
    )
}  # fmt: skip


def from_rank_0(value: ValueT, group: dist.ProcessGroup) -> ValueT:
    """Rank 0's value on every rank of `group`, pickled: decisions and messages, no tensors."""
    box = [value]
    dist.broadcast_object_list(box, group_src=0, group=group)
    return box[0]


def decided_by_rank_0(decide: Callable[[], ValueT], group: dist.ProcessGroup) -> ValueT:
    """What `decide` gives on rank 0 of `group`, on every rank of it. Every rank calls it.

    Raises:
        ConfigError: on every rank, what `decide` raised.
    """
    value: ValueT | None = None
    problems: tuple[str, ...] = ()
    if dist.get_rank(group) == 0:
        try:
            value = decide()
        except ConfigError as error:
            problems = error.problems
    value, problems = from_rank_0((value, problems), group)
    if problems:
        raise ConfigError(problems)
    return cast(ValueT, value)


def raise_together(failure: Exception | None, group: dist.ProcessGroup) -> None:
    """End on every rank of `group` what failed on one. Collective: one integer.

    Raises:
        Exception: `failure` itself, on the rank that has it.
        RunFailed: elsewhere, with the number of the first such rank of the group.
    """
    mine = dist.get_rank(group)
    none = dist.get_world_size(group)
    first = torch.tensor(none if failure is None else mine)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    if failure is not None:
        raise failure
    if first < none:
        raise RunFailed(f"rank {int(first)} failed; its message says how")


def broadcast_tensors(
    tensors: Mapping[str, Tensor] | None, *, src_rank: int = 0, group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """The source rank's named CPU tensors, on every rank, bit for bit.

    Every rank of `group` calls it; the group must move CPU tensors (gloo). Two small messages
    announce names, dtypes and shapes; one follows for each tensor. Nothing is pickled, so a
    receiver runs no foreign code.

    Args:
        tensors: name -> contiguous or strided CPU tensor on `src_rank`; ignored elsewhere.
        src_rank: global rank that holds them.

    Raises:
        RuntimeError: the source rank has none, or a dtype that cannot travel.
    """
    is_source = dist.get_rank() == src_rank
    header = _header(tensors) if is_source else b""
    length = torch.tensor([len(header)], dtype=torch.int64)
    dist.broadcast(length, src_rank, group=group)
    text = torch.zeros(int(length), dtype=torch.uint8)
    if is_source:
        text = torch.tensor(list(header), dtype=torch.uint8)
    dist.broadcast(text, src_rank, group=group)
    received: dict[str, Tensor] = {}
    for name, dtype, shape in json.loads(bytes(text.tolist())):
        if is_source:
            assert tensors is not None, "the header was made from these tensors"
            value = tensors[name].detach().contiguous()
        else:
            value = torch.empty(shape, dtype=_DTYPES[dtype])
        if value.numel():
            dist.broadcast(value.view(-1).view(torch.uint8), src_rank, group=group)
        received[name] = value
    return received


def _header(tensors: Mapping[str, Tensor] | None) -> bytes:
    if tensors is None:
        raise RuntimeError("broadcast_tensors: the source rank passed no tensors")
    rows = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES or tensor.device.type != "cpu":
            raise RuntimeError(
                f"broadcast_tensors: {name} is {dtype} on {tensor.device}; "
                f"need a CPU tensor of {sorted(_DTYPES)}"
            )
        rows.append((name, dtype, list(tensor.shape)))
    return json.dumps(rows).encode()


class _GatherSequence(torch.autograd.Function):
    """All-gather along dim 0; backward sums each rank's share of the gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, local: Tensor, group: dist.ProcessGroup):  # type: ignore[no-untyped-def]
        ctx.group = group  # type: ignore[attr-defined]
        whole = local.new_empty((local.size(0) * group.size(), *local.shape[1:]))
        dist.all_gather_into_tensor(whole, local.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor):  # type: ignore[no-untyped-def,override]
        group = ctx.group  # type: ignore[attr-defined]
        local = gradient.new_empty((gradient.size(0) // group.size(), *gradient.shape[1:]))
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=group)
        return local, None


def gather_sequence(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' slices one behind the other, [ranks * tokens, ...].

    Every rank of `group` calls it with the same shape, in forward and in backward; each holds
    the whole afterwards.

    Args:
        local: [tokens, ...], this rank's slice. Carries gradient: the backward pass sums over
            the group and hands each rank its slice (reduce-scatter).
    """
    return local if group.size() == 1 else _GatherSequence.apply(local, group)


def zigzag_index(cu_seqlens: Tensor, size: int) -> Tensor:
    """Which tokens of a pack each context rank holds, [size, tokens / size] int64.

    Each sequence is cut into 2 * size equal chunks; rank r takes chunks r and 2 * size - 1 - r,
    so that all ranks do the same amount of causal attention.

    Args:
        cu_seqlens: [sequences + 1] int32, boundaries of the whole pack.
        size: number of context ranks.

    Raises:
        ValueError: a sequence cannot be cut into 2 * size equal chunks.
    """
    bounds = cu_seqlens.tolist()
    rows: list[list[Tensor]] = [[] for _ in range(size)]
    for start, end in pairwise(bounds):
        if (end - start) % (2 * size):
            raise ValueError(
                f"a sequence of {end - start} tokens cannot be split over {size} context ranks: "
                f"pad each sequence to a multiple of {2 * size}"
            )
        chunks = torch.arange(start, end).view(2 * size, -1)
        for rank in range(size):
            rows[rank] += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.stack([torch.cat(row) for row in rows])
