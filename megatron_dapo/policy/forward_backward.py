"""Micro-batches through Megatron's pipeline schedule, with or without the backward pass.

The schedule owns the order, the messages between stages and the finalisation of gradients; this
module feeds it, and hands the outputs of the last stage to a callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_dapo import device
from megatron_dapo.batch.packing import context_slice
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.types import MicroBatch

device.install_cpu_support()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

Result = TypeVar("Result")
Visit = Callable[[Tensor, MicroBatch], Result]
"""(final hidden states [tokens / cp, hidden], under sequence parallelism this tensor rank's part of
them, or values [tokens / cp, 1]; micro-batch of this context rank) -> what to keep."""
LossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor, Result]]
"""The same -> (loss_sum, denominator, what to keep). loss_sum is a scalar with gradient and
denominator an int64 scalar, both this rank's parts: Megatron divides the summed gradients once,
by the sum of the denominators over data and context ranks and micro-batches."""


def local_micro_batches(
    micro_batches: Sequence[MicroBatch], parallel: ParallelContext
) -> list[MicroBatch]:
    """This context rank's part of each pack, on the training device."""
    target = device.current()
    return [
        _to_device(context_slice(micro_batch, parallel.cp_rank, parallel.cp_size), target)
        for micro_batch in micro_batches
    ]


def _to_device(micro_batch: MicroBatch, target: torch.device) -> MicroBatch:
    moved = {
        name: value.to(target, non_blocking=True)
        for name in micro_batch.__dataclass_fields__
        if isinstance(value := getattr(micro_batch, name), Tensor)
    }
    return micro_batch.replace(**moved)


def visit_outputs(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    visit: Visit[Result],
    parallel: ParallelContext,
) -> list[Result]:
    """Forward only: `visit` of each micro-batch, in order, on the last stage; [] elsewhere.

    Every rank calls it with equally many, equally long micro-batches. Nothing carries gradient.

    Args:
        micro_batches: from `local_micro_batches`.
    """

    def collect(
        visit_one: Visit[Result], micro_batch: MicroBatch, output: Tensor, non_loss_data: bool
    ) -> Result:
        return visit_one(output[0], micro_batch)

    with torch.no_grad():
        return _schedule(chunks, micro_batches, partial(collect, visit), parallel, backward=False)


def accumulate_gradients(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction[Result],
    parallel: ParallelContext,
) -> list[Result]:
    """Forward and backward; what `loss_function` kept, in order, on the last stage; [] elsewhere.

    Every rank calls it with equally many, equally long micro-batches; one without a counted
    token still runs backward. Afterwards the main gradients of `chunks` (Megatron DDP) hold the
    gradient of sum(loss_sum) / sum(denominator), reduced over all groups.
    """

    def loss(
        loss_of: LossFunction[Result], micro_batch: MicroBatch, output: Tensor
    ) -> tuple[Tensor, Tensor, Result]:
        return loss_of(output[0], micro_batch)

    return _schedule(chunks, micro_batches, partial(loss, loss_function), parallel, backward=True)


def _schedule(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    callback: Callable[..., object],
    parallel: ParallelContext,
    *,
    backward: bool,
) -> list[Result]:
    _check_equal(chunks, micro_batches, parallel)
    iterators = [iter(micro_batches) for _ in chunks]
    run = get_forward_backward_func()
    return run(
        forward_step_func=partial(_forward_step, callback),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].num_tokens * parallel.cp_size,
        micro_batch_size=1,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )


def _forward_step(
    callback: Callable[..., object], iterator: Iterator[MicroBatch], model: nn.Module
) -> tuple[Tensor, Callable[..., object]]:
    """Megatron's forward step: this stage's output, and what to do with it on the last stage."""
    micro_batch = next(iterator)
    output = model(
        micro_batch.tokens[None],
        micro_batch.position_ids[None],
        None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=micro_batch.cu_seqlens,
            cu_seqlens_kv=micro_batch.cu_seqlens,
            max_seqlen_q=micro_batch.max_seqlen,
            max_seqlen_kv=micro_batch.max_seqlen,
        ),
    )
    return output, partial(callback, micro_batch)


def _check_equal(
    chunks: Sequence[nn.Module], micro_batches: Sequence[MicroBatch], parallel: ParallelContext
) -> None:
    """Refuse what would deadlock the schedule. Communicates: 4 integers over the dp_cp_group."""
    if not micro_batches:
        raise ValueError("no micro-batches: an update has at least one, of padding if need be")
    lengths = {micro_batch.num_tokens for micro_batch in micro_batches}
    if len(lengths) > 1:
        raise ValueError(
            f"micro-batches of {sorted(lengths)} tokens in one pass: stages exchange no shapes, so "
            "pad all micro-batches of an update to one length (batch.packing.pack_update)"
        )
    count, length = len(micro_batches), lengths.pop()
    if len(chunks) > 1 and count % parallel.pp_size:
        raise ValueError(
            f"{count} micro-batches with parallel.virtual_pipeline: need a multiple of "
            f"parallel.pipeline={parallel.pp_size} (pack_update's micro_batch_multiple)"
        )
    extremes = torch.tensor([count, -count, length, -length], device=device.current())
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=parallel.dp_cp_group)
    if extremes.tolist() != [count, -count, length, -length]:
        raise ValueError(
            f"this rank has {count} micro-batches of {length} tokens, another has up to "
            f"{int(extremes[0])} of {int(extremes[2])}: data-parallel ranks must have equally many "
            "of one length (batch.packing.pack_update with the same rows on every rank)"
        )
