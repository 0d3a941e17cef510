"""An update of an engine's weights without a plan: full tensors gathered, broadcast, and cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.resharding.cuts import unfuse
from megatron_dapo.resharding.name_map import Entry
from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.train_map import blocks

TRAINERS, WORKERS = 2, 2


class Gathered:
    """What peers do: full tensors on every trainer, a broadcast, a cut on every worker."""

    def __init__(self, plan: ReshardPlan, rank: int, held: Mapping[str, Tensor]) -> None:
        self.plan, self.rank, self.held = plan, rank, held
        self.bytes_received = 0
        self.trainers = dist.new_group(list(range(TRAINERS)))
        self.receivers = dist.new_group([0, *range(TRAINERS, TRAINERS + WORKERS)])

    def run(self) -> None:
        self.bytes_received = 0
        bucket: dict[str, tuple[tuple[int, ...], Tensor | None]] = {}
        filled = 0
        for entry in self.plan.entries:
            full = self._full(entry) if self.rank < TRAINERS else [None] * len(entry.hf)
            for tensor, value in zip(entry.hf, full, strict=True):
                size = torch.Size(tensor.shape).numel() * 2
                if bucket and filled + size > self.plan.bucket_bytes:
                    self._broadcast(bucket, filled)
                    bucket, filled = {}, 0
                bucket[tensor.name] = (tensor.shape, value)
                filled += size
        self._broadcast(bucket, filled)

    def _full(self, entry: Entry) -> Sequence[Tensor | None]:
        """Full Hugging Face tensors of one parameter, on every trainer."""
        shard = self.held[entry.key]
        cut = entry.rule.cut
        if cut.dim is None:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(TRAINERS)]
        dist.all_gather(shards, shard, group=self.trainers)
        self.bytes_received += shard.nbytes * (TRAINERS - 1)
        dim = cut.dim
        if cut.padded or dim == 1:
            whole = torch.cat(shards, dim)
            return [whole.narrow(dim, 0, entry.hf[0].shape[dim])]
        rows = [tensor.shape[0] // TRAINERS for tensor in entry.hf]
        count = blocks(entry.rule, self.plan.family, TRAINERS)
        parts = [unfuse(one, rows, count) for one in shards]
        return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]

    def _broadcast(
        self, bucket: Mapping[str, tuple[tuple[int, ...], Tensor | None]], size: int
    ) -> None:
        if self.rank in range(1, TRAINERS):
            return
        if self.rank == 0:
            whole = [value.reshape(-1) for _, value in bucket.values() if value is not None]
            dist.broadcast(torch.cat(whole), 0, group=self.receivers)
            return
        flat = torch.empty(size // 2, dtype=torch.bfloat16)
        dist.broadcast(flat, 0, group=self.receivers)
        self.bytes_received += size
        offset = 0
        for name, (shape, _) in bucket.items():
            count = torch.Size(shape).numel()
            self._load(name, flat[offset : offset + count].view(shape))
            offset += count

    def _load(self, name: str, full: Tensor) -> None:
        """As a weight loader of an engine does."""
        worker, numbers = self.rank - TRAINERS, [n for n in name.split(".") if n.isdigit()]
        open_name = name.replace(f".{numbers[0]}.", ".{layer}.") if numbers else name
        target = self.plan.map.target(open_name, worker)
        parameter = target.parameter.format(layer=numbers[0] if numbers else None)
        into = self.held[parameter]
        into = into.view(-1, 1) if into.dim() == 1 else into
        source = full.view(-1, 1) if full.dim() == 1 else full
        piece = target.piece
        part = source[piece.row : piece.row + piece.rows, piece.col : piece.col + piece.cols]
        into[piece.to_row : piece.to_row + part.shape[0], : part.shape[1]].copy_(part)
