"""A rollout batch -> updates -> packed micro-batches, balanced over data-parallel ranks.

Every rank computes the same plan from the same lengths, so nothing is communicated. One update
becomes `data-parallel size x M` bins; all bins are padded to one length, so every rank and every
pipeline stage runs the same number of equally long micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_dapo.config import RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.types import NO_LABEL, MicroBatch, RolloutBatch

PAD_TOKEN = 0
"""Token id of padding: any real row of the embedding, so that its activations stay ordinary."""

Fp8Recipe = Literal["none", "blockwise", "tensorwise", "delayed", "mxfp8"]
_FP8_BLOCK: Mapping[str, int] = {
    "none": 1,
    "tensorwise": 16,
    "delayed": 16,
    "mxfp8": 32,
    "blockwise": 128,
}


def pad_multiple(tp: int, cp: int, sequence_parallel: bool, precision: Fp8Recipe) -> int:
    """Smallest number that the length of every pack must be a multiple of.

    The shard of one rank (cut by context, and by tensor under sequence parallelism) must fill
    whole FP8 blocks, and the zig-zag cut needs 2 x cp equal parts: the least common multiple.
    """
    if precision not in _FP8_BLOCK:
        raise ValueError(f"precision {precision!r} must be one of {', '.join(_FP8_BLOCK)}")
    shards = cp * (tp if sequence_parallel else 1)
    return math.lcm(_FP8_BLOCK[precision] * shards, _sequence_multiple(cp))


def _sequence_multiple(cp: int) -> int:
    return 2 * cp if cp > 1 else 1


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def split_updates(
    batch: RolloutBatch, responses_per_update: int, epochs: int = 1, *, allow_partial: bool = False
) -> list[Tensor]:
    """Rows of each update, in order: whole groups, `responses_per_update` rows each.

    Args:
        batch: rollout batch; rows of a group lie together.
        responses_per_update: responses (not prompts) of one optimizer step.
        epochs: passes over the batch; each has the same updates.
        allow_partial: the last update may be smaller, for a batch that fell short of its target
            (`sampling.when_short=train`).

    Returns:
        int64 tensors of rows; together they hold every row once an epoch.

    Raises:
        ValueError: groups do not fill updates exactly.
    """
    _, sizes = torch.unique_consecutive(batch.group_index, return_counts=True)
    updates: list[Tensor] = []
    start = end = 0
    for size in sizes.tolist():
        end += size
        if end - start > responses_per_update:
            raise ValueError(
                f"training.responses_per_update={responses_per_update} cuts a group of {size} "
                f"responses in two (rows {end - size}..{end - 1}): make it a multiple of "
                "rollout.group_size"
            )
        if end - start == responses_per_update:
            updates.append(torch.arange(start, end))
            start = end
    if end > start:
        if not allow_partial:
            raise ValueError(
                f"{batch.num_responses} responses do not fill updates of "
                f"training.responses_per_update={responses_per_update}: {end - start} are left "
                "over. rollout.prompts_per_step x rollout.group_size must be a multiple of it"
            )
        updates.append(torch.arange(start, end))
    return updates * epochs


def plan_bins(
    lengths: Sequence[int],
    *,
    dp_size: int,
    tokens_per_micro_batch: int,
    micro_batch_multiple: int = 1,
    min_micro_batches: int = 1,
) -> list[list[list[int]]]:
    """Which sequences go where: [data-parallel rank][micro-batch] -> positions in `lengths`.

    Longest first into the emptiest bin, with the fewest micro-batches a rank for which every bin
    keeps the budget; bins are dealt to ranks by size. So no bin holds more than the mean plus the
    longest sequence, and no two ranks differ by more than their fullest and emptiest bin.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > tokens_per_micro_batch:
        raise ValueError(
            f"a sequence of {lengths[order[0]]} tokens does not fit "
            f"training.tokens_per_micro_batch={tokens_per_micro_batch}: a sequence is never cut, "
            "so allow at least data.max_prompt_tokens + rollout.max_response_tokens"
        )
    least = math.ceil(sum(lengths) / (dp_size * tokens_per_micro_batch))
    count = _round_up(max(least, min_micro_batches, 1), micro_batch_multiple)
    while (bins := _fill(lengths, order, dp_size * count, tokens_per_micro_batch)) is None:
        count += micro_batch_multiple
    bins.sort(key=lambda rows: (-sum(lengths[i] for i in rows), rows))
    return [bins[rank::dp_size] for rank in range(dp_size)]


def _fill(
    lengths: Sequence[int], order: Sequence[int], count: int, budget: int
) -> list[list[int]] | None:
    """Longest-first filling of `count` bins, or None when one would pass the budget."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for i in order:
        load, number = heap[0]
        if load + lengths[i] > budget:
            return None
        bins[number].append(i)
        heapq.heapreplace(heap, (load + lengths[i], number))
    return [sorted(rows) for rows in bins]


def pack_for_rank(
    batch: RolloutBatch, rows: Tensor, config: RunConfig, parallel: ParallelContext
) -> list[MicroBatch]:
    """Micro-batches of one update that this rank's data rank runs, by the run's settings. Local."""
    layout = config.parallel
    return pack_update(
        batch,
        rows,
        dp_rank=parallel.dp_rank,
        dp_size=layout.data,
        tokens_per_micro_batch=config.training.tokens_per_micro_batch,
        pad_multiple=pad_multiple(
            layout.tensor, layout.context, layout.uses_sequence_parallel, config.precision.fp8
        ),
        micro_batch_multiple=layout.pipeline if layout.virtual_pipeline else 1,
        min_micro_batches=layout.pipeline,
        cp_size=layout.context,
    )


def pack_update(
    batch: RolloutBatch,
    rows: Tensor,
    *,
    dp_rank: int,
    dp_size: int,
    tokens_per_micro_batch: int,
    pad_multiple: int,
    micro_batch_multiple: int = 1,
    min_micro_batches: int = 1,
    cp_size: int = 1,
) -> list[MicroBatch]:
    """Micro-batches of this data-parallel rank for one update, CPU tensors.

    Every data-parallel rank gets the same number of them, all of the same padded length; a rank
    (or bin) without sequences gets padding only. Called by every rank; nothing is communicated.

    Args:
        batch: rollout batch, identical on all ranks.
        rows: [responses of the update] int64, from `split_updates`.
        dp_rank, dp_size: data-parallel rank and size.
        tokens_per_micro_batch: budget of one pack, all context ranks together. Padding to
            `pad_multiple` may pass it by less than `pad_multiple`.
        pad_multiple: see the function of that name.
        micro_batch_multiple: number of micro-batches is a multiple of it (interleaved pipeline).
        min_micro_batches: at least so many micro-batches a rank.
        cp_size: context-parallel size; above 1 each sequence is padded to a multiple of
            2 x cp_size with tokens that carry no label and no loss. `context_slice` cuts later.

    Raises:
        ValueError: a sequence is longer than the budget, or a prompt has no token.
    """
    multiple = _sequence_multiple(cp_size)
    assert pad_multiple % multiple == 0, f"{pad_multiple=} must be a multiple of 2 x {cp_size=}"
    if (empty := rows[batch.prompt_tokens[rows] < 1]).numel():
        raise ValueError(
            f"prompt_tokens[{int(empty[0])}]={int(batch.prompt_tokens[empty[0]])}: the position "
            "before a response predicts its first token, so a prompt has at least one"
        )
    lengths = (batch.prompt_tokens + batch.response_tokens)[rows]
    padded = [_round_up(length, multiple) for length in lengths.tolist()]
    plan = plan_bins(
        padded,
        dp_size=dp_size,
        tokens_per_micro_batch=_round_up(tokens_per_micro_batch, pad_multiple),
        micro_batch_multiple=micro_batch_multiple,
        min_micro_batches=min_micro_batches,
    )
    fullest = max(sum(padded[i] for i in positions) for bins in plan for positions in bins)
    total = _round_up(max(fullest, 1), pad_multiple)
    writer = _PackWriter(batch)
    return [
        writer.pack(rows[torch.tensor(positions, dtype=torch.int64)], multiple, total)
        for positions in plan[dp_rank]
    ]


class _PackWriter:
    """Copies rows of a batch into packs; holds the row offsets."""

    def __init__(self, batch: RolloutBatch) -> None:
        self.batch = batch
        lengths = batch.prompt_tokens + batch.response_tokens
        self.token_ends = lengths.cumsum(0).tolist()
        self.logprob_ends = batch.response_tokens.cumsum(0).tolist()
        self.prompts = batch.prompt_tokens.tolist()
        self.responses = batch.response_tokens.tolist()

    def pack(self, rows: Tensor, sequence_multiple: int, total: int) -> MicroBatch:
        tokens = torch.full((total,), PAD_TOKEN, dtype=torch.int64)
        labels = torch.full((total,), NO_LABEL, dtype=torch.int64)
        position_ids = torch.zeros(total, dtype=torch.int64)
        loss_mask = torch.zeros(total, dtype=torch.bool)
        sequence_index = torch.zeros(total, dtype=torch.int64)
        group_index = torch.zeros(total, dtype=torch.int64)
        advantages = torch.zeros(total)
        rollout_logprobs = torch.zeros(total)
        ends = [0]
        for number, row in enumerate(rows.tolist()):
            start, prompt, response = ends[-1], self.prompts[row], self.responses[row]
            length = prompt + response
            end = start + _round_up(length, sequence_multiple)
            ids = self.batch.tokens[self.token_ends[row] - length : self.token_ends[row]]
            tokens[start : start + length] = ids
            labels[start : start + length - 1] = ids[1:]
            position_ids[start:end] = torch.arange(end - start)
            sequence_index[start:end] = number
            group_index[start:end] = self.batch.group_index[row]
            answer = slice(start + prompt - 1, start + length - 1)  # positions that predict it
            loss_mask[answer] = self.batch.trained[row]
            advantages[answer] = self.batch.advantages[row]
            stop = self.logprob_ends[row]
            rollout_logprobs[answer] = self.batch.rollout_logprobs[stop - response : stop]
            ends.append(end)
        if ends[-1] < total:
            position_ids[ends[-1] :] = torch.arange(total - ends[-1])
            ends.append(total)
        cu_seqlens = torch.tensor(ends, dtype=torch.int32)
        return MicroBatch(
            tokens=tokens,
            labels=labels,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=int(cu_seqlens.diff().max()),
            loss_mask=loss_mask,
            sequence_index=sequence_index,
            num_sequences=rows.numel(),
            advantages=advantages,
            group_index=group_index,
            rollout_logprobs=rollout_logprobs,
            rows=rows,
            rewards=self.batch.rewards[rows],
        )


def context_slice(micro_batch: MicroBatch, cp_rank: int, cp_size: int) -> MicroBatch:
    """This context rank's part of a whole pack: chunks r and 2 x cp - 1 - r of each sequence.

    The zig-zag gives every rank the same attention work under a causal mask. All [tokens] fields
    become [tokens / cp_size]; `cu_seqlens`, `max_seqlen`, `num_sequences` and `rows` stay those of
    the whole pack. Labels were set before the cut, so none crosses a chunk. Local: every rank of
    cp_group holds the same pack and cuts it for itself. `rewards` stay whole too.

    Raises:
        ValueError: a sequence does not divide into 2 x cp_size chunks.
    """
    if cp_size == 1:
        return micro_batch
    starts = micro_batch.cu_seqlens[:-1].tolist()
    lengths = micro_batch.cu_seqlens.diff().tolist()
    pieces: list[Tensor] = []
    for start, length in zip(starts, lengths, strict=True):
        chunk, rest = divmod(length, 2 * cp_size)
        if rest:
            raise ValueError(
                f"a sequence of {length} tokens does not divide into {2 * cp_size} chunks for "
                f"context parallelism {cp_size}: pack with cp_size={cp_size}"
            )
        for part in (cp_rank, 2 * cp_size - 1 - cp_rank):
            pieces.append(torch.arange(start + part * chunk, start + (part + 1) * chunk))
    index = torch.cat(pieces).to(micro_batch.tokens.device)
    found_later = {
        "old_logprobs": micro_batch.old_logprobs,
        "reference_logprobs": micro_batch.reference_logprobs,
        "values": micro_batch.values,
        "returns": micro_batch.returns,
    }
    return micro_batch.replace(
        tokens=micro_batch.tokens[index],
        labels=micro_batch.labels[index],
        position_ids=micro_batch.position_ids[index],
        loss_mask=micro_batch.loss_mask[index],
        sequence_index=micro_batch.sequence_index[index],
        advantages=micro_batch.advantages[index],
        group_index=micro_batch.group_index[index],
        rollout_logprobs=micro_batch.rollout_logprobs[index],
        **{name: value[index] for name, value in found_later.items() if value is not None},
    )
