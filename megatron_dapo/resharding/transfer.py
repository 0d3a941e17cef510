"""Send the policy's weights out: gather full Hugging Face tensors on rank 0, bucket by bucket.

Every rank derives the same list of messages from the name table and the layout, so only
weights travel: one flat message for each bucket from each rank that holds a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from transformers import PretrainedConfig

from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.resharding.cuts import unfuse
from megatron_dapo.resharding.layout import find_layout, local_parameters
from megatron_dapo.resharding.name_map import Entry, Family, family_for
from megatron_dapo.resharding.train_map import TrainLayout, blocks, source_shape

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

DESTINATION = 0
"""Global rank that holds the full tensors."""


@dataclass(frozen=True)
class WeightStream:
    """Full Hugging Face tensors in a known order; iterate it once, on every rank.

    Global rank 0 gets (name, tensor) pairs; the other ranks get none (unless it was asked for
    `everywhere`) but must iterate too.
    """

    tensors: Mapping[str, tuple[int, ...]]
    """Name -> shape of all that will come, in order; the same on every rank."""
    dtype: torch.dtype
    source: Iterable[tuple[str, Tensor]]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.source)


def export_stream(
    chunks: Sequence[GPTModel],
    hf_config: PretrainedConfig,
    parallel: ParallelContext,
    *,
    bucket_bytes: int = 512 * 2**20,
    dtype: torch.dtype | None = None,
    everywhere: bool = False,
) -> WeightStream:
    """All weights as full Hugging Face tensors on global rank 0.

    Every trainer rank calls it and iterates the result to its end. The world group exchanges
    one integer, then rank 0 receives one flat message for each bucket from each rank that holds
    a shard of it. Rank 0 holds at most two buckets beside the model; a tensor larger than a
    bucket is a bucket of its own. Parameters are read when their bucket is due: no optimizer
    step may run before the stream has ended. No gradient.

    Args:
        chunks: this rank's model chunks, unwrapped.
        bucket_bytes: full tensors of one bucket together.
        dtype: of the messages and of the result; default the model's.
        everywhere: rank 0 broadcasts each bucket, and every rank gets all pairs. They are views
            of the bucket, which lives as long as one of them does.

    Raises:
        ValueError: a parameter that the name table does not know.
    """
    family = family_for(hf_config)
    parameters = local_parameters(chunks, family, parallel)
    layout = find_layout(parameters, parallel, len(chunks))
    gather = _Gather(family, layout, parameters, parallel, dtype or chunks[0].config.params_dtype)
    exported = [entry for entry in family.entries if entry.rule.exported]
    buckets = fill_buckets(exported, bucket_bytes // gather.dtype.itemsize)
    source = gather.everywhere(buckets) if everywhere else gather.stream(buckets)
    return WeightStream(family.hf_tensors, gather.dtype, source)


def fill_buckets(entries: Iterable[Entry], elements: int) -> Iterator[list[Entry]]:
    """Runs of entries of at most `elements` together; a larger entry stands alone."""
    bucket: list[Entry] = []
    filled = 0
    for entry in entries:
        size = sum(math.prod(tensor.shape) for tensor in entry.hf)
        if bucket and filled + size > elements:
            yield bucket
            bucket, filled = [], 0
        bucket.append(entry)
        filled += size
    if bucket:
        yield bucket


@dataclass(frozen=True)
class _Gather:
    family: Family
    layout: TrainLayout
    parameters: Mapping[Entry, Parameter]
    parallel: ParallelContext
    dtype: torch.dtype

    def stream(self, buckets: Iterable[list[Entry]]) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets:
            if self.parallel.rank == DESTINATION:
                shards = self._receive(bucket)
                for entry in bucket:
                    yield from self._assemble(entry, shards.pop(entry))
            else:
                self._send(bucket)

    def everywhere(self, buckets: Iterable[list[Entry]]) -> Iterator[tuple[str, Tensor]]:
        """The same on every rank: each bucket is broadcast as one flat tensor."""
        for bucket in buckets:
            tensors = [tensor for entry in bucket for tensor in entry.hf]
            sizes = [math.prod(tensor.shape) for tensor in tensors]
            flat = torch.empty(sum(sizes), dtype=self.dtype, device=self._device)
            views = flat.split(sizes)
            for (_, full), view in zip(self.stream([bucket]), views, strict=False):
                view.copy_(full.reshape(-1))
            dist.broadcast(flat, DESTINATION, group=self._group)
            for tensor, view in zip(tensors, views, strict=True):
                yield tensor.name, view.view(tensor.shape)

    def _own(self, entry: Entry) -> Tensor:
        return self.parameters[entry].detach().to(self.dtype)

    def _send(self, bucket: Sequence[Entry]) -> None:
        rank = self.parallel.rank
        mine = [self._own(entry).reshape(-1) for entry in bucket if rank in self._holders(entry)]
        if mine:
            self._run([dist.P2POp(dist.isend, torch.cat(mine), DESTINATION, self._group)])

    def _receive(self, bucket: Sequence[Entry]) -> dict[Entry, list[Tensor]]:
        """Shards of each entry in order, as views of the messages (own ones: the parameters)."""
        expected: dict[int, list[Entry]] = {}
        for entry in bucket:
            for holder in self._holders(entry):
                expected.setdefault(holder, []).append(entry)
        own = expected.pop(DESTINATION, [])
        messages = {holder: self._message(entries) for holder, entries in expected.items()}
        self._run(
            [
                dist.P2POp(dist.irecv, message, holder, self._group)
                for holder, message in messages.items()
            ]
        )
        pieces = {(DESTINATION, entry): self._own(entry) for entry in own}
        for holder, entries in expected.items():
            shapes = [self._shape(entry) for entry in entries]
            flats = messages[holder].split([math.prod(shape) for shape in shapes])
            for entry, shape, flat in zip(entries, shapes, flats, strict=True):
                pieces[holder, entry] = flat.view(shape)
        return {
            entry: [pieces[holder, entry] for holder in self._holders(entry)] for entry in bucket
        }

    def _message(self, entries: Iterable[Entry]) -> Tensor:
        size = sum(math.prod(self._shape(entry)) for entry in entries)
        return torch.empty(size, dtype=self.dtype, device=self._device)

    def _assemble(self, entry: Entry, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        dim = entry.rule.cut.dim or 0
        full = [
            torch.empty(tensor.shape, dtype=self.dtype, device=self._device) for tensor in entry.hf
        ]
        for index, shard in enumerate(shards):
            covered = self.layout.slices(entry, index)
            rows = [part.stop - part.start for part in covered]
            parts = unfuse(shard, rows, blocks(entry.rule, self.family, len(shards)))
            for target, piece, part in zip(full, parts, covered, strict=True):
                length = part.stop - part.start  # less than the piece where it ends in padding
                target.narrow(dim, part.start, length).copy_(piece.narrow(dim, 0, length))
        for tensor, value in zip(entry.hf, full, strict=True):
            yield tensor.name, value

    def _holders(self, entry: Entry) -> list[int]:
        return self.layout.holders(entry, self.family)

    def _shape(self, entry: Entry) -> tuple[int, ...]:
        """Of the parameter on each rank that holds a shard of it."""
        return source_shape(entry, self.family, self.layout)

    def _run(self, operations: list[dist.P2POp]) -> None:
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self.parallel.world_group
