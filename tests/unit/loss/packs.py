"""Micro-batches of made-up responses for ledger and loss tests."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dapo.types import NO_LABEL, MicroBatch


def pack(
    responses: list[tuple[int, int, list[int]]],
    *,
    padding: int = 2,
    positions: slice = slice(None),
    old_logprobs: Tensor | None = None,
) -> MicroBatch:
    """Responses given as (row, group, mask of its tokens), back to back, then padding.

    `positions` keeps only those tokens of each response: one context rank's share.
    """
    kept = [mask[positions] for _, _, mask in responses]
    lengths = torch.tensor([len(mask) for mask in kept], dtype=torch.int64)
    tokens = int(lengths.sum()) + padding
    filler = torch.zeros(padding, dtype=torch.int64)

    def spread(values: list[int]) -> Tensor:
        per_response = torch.tensor(values, dtype=torch.int64)
        return torch.cat([torch.repeat_interleave(per_response, lengths), filler])

    flat = torch.tensor([bit for mask in kept for bit in mask], dtype=torch.bool)
    return MicroBatch(
        tokens=torch.zeros(tokens, dtype=torch.int64),
        labels=torch.full((tokens,), NO_LABEL),
        position_ids=torch.zeros(tokens, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        max_seqlen=tokens,
        loss_mask=torch.cat([flat, filler.bool()]),
        sequence_index=spread(list(range(len(responses)))),
        num_sequences=len(responses),
        advantages=torch.ones(tokens),
        group_index=spread([group for _, group, _ in responses]),
        rollout_logprobs=torch.zeros(tokens),
        rows=torch.tensor([row for row, _, _ in responses], dtype=torch.int64),
        rewards=torch.zeros(len(responses)),
        old_logprobs=old_logprobs,
    )
