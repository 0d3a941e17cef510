"""Log-prob and entropy of labels from vocabulary-parallel logits, with a hand-written backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dapo.loss.shards import (
    Scratch,
    VocabShard,
    block_rows,
    block_statistics,
    check_labels,
    compute_dtype,
    merge_statistics,
    row_gradient,
    write_gradient,
)


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    real_vocab_size: int | None = None,
    with_entropy: bool = True,
    chunk_tokens: int | None = None,
    inplace_backward: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each label and entropy of its distribution, both [tokens] fp32.

    Both carry gradient to `logits`. Kept for backward: the logits themselves and three numbers a
    token; the softmax is recomputed row block by row block.

    Every rank of `tp_group` calls with its columns and the same targets, and holds the same
    result. Communicates: one all-gather of 4 floats a token in forward, nothing in backward
    (the gradients of logprobs and entropy must be the same on every rank).

    Args:
        logits: [tokens, vocab / tp] any float dtype; rank r holds ids r * vocab/tp and on.
        targets: [tokens] int64 token ids, or NO_LABEL (-100): log-prob 0, entropy 0, gradient
            0, whatever that row's logits hold.
        tp_group: ranks that share the vocabulary; None: this rank holds all of it.
        temperature: divides the logits after the upcast to fp32; the rollout's temperature.
        real_vocab_size: ids from here on are padding: excluded, zero gradient.
        with_entropy: False returns None for the entropy and saves its pass.
        chunk_tokens: rows of a block; None: what a cache holds.
        inplace_backward: backward overwrites `logits` with their gradient and returns that
            buffer. The logits are spent then: a second backward raises. False: a new tensor.

    Raises:
        ValueError: shapes, temperature, real_vocab_size, or (on CPU) a label out of range. On a
            device such a label makes its log-prob NaN.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: need "
            "[tokens, vocab / tp] and [tokens]; flatten [seq, batch] first"
        )
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature}: need > 0; greedy sampling has no log-probs to train on"
        )
    shard = VocabShard.of(logits.shape[1], tp_group, real_vocab_size)
    check_labels(targets, shard)
    rows = block_rows(targets.numel(), logits.shape[1], logits.device, chunk_tokens)
    options = _Options(shard, temperature, with_entropy, rows, inplace_backward)
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, options)
    return logprobs, entropy


class _Options(NamedTuple):
    shard: VocabShard
    temperature: float
    with_entropy: bool
    rows: int
    inplace: bool


class _VocabParallelLogprobs(torch.autograd.Function):
    """The visits over row blocks; see `vocab_parallel_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        shard, rows, tokens = options.shard, options.rows, targets.numel()
        scratch = Scratch(rows, shard.columns, logits)
        local = logits.new_empty((4, tokens), dtype=compute_dtype(logits.dtype))
        for start in range(0, tokens, rows):
            block = slice(start, start + rows)
            local[:, block] = block_statistics(
                logits[block],
                targets[block],
                shard,
                temperature=options.temperature,
                with_entropy=options.with_entropy,
                scratch=scratch,
            )
        merged = merge_statistics(
            local,
            targets,
            shard,
            temperature=options.temperature,
            with_entropy=options.with_entropy,
        )
        ctx.options = options
        ctx.set_materialize_grads(False)
        entropy = () if merged.entropy is None else (merged.entropy,)
        ctx.save_for_backward(logits, targets, merged.peak, merged.sumexp, *entropy)
        return merged.logprobs, merged.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None
        logits, targets, peak, sumexp, *entropy = ctx.saved_tensors
        options = ctx.options
        gradient = row_gradient(
            targets,
            peak,
            sumexp,
            entropy[0] if entropy else None,
            grad_logprobs,
            grad_entropy,
            temperature=options.temperature,
        )
        inplace = options.inplace and _rows_are_apart(logits)
        out = logits.detach() if inplace else torch.empty_like(logits)
        scratch = Scratch(options.rows, options.shard.columns, logits)
        for start in range(0, targets.numel(), options.rows):
            block = slice(start, start + options.rows)
            write_gradient(
                logits[block],
                targets[block],
                gradient.block(block),
                options.shard,
                temperature=options.temperature,
                scratch=scratch,
                out=out[block],
            )
        return out, None, None


def _rows_are_apart(logits: Tensor) -> bool:
    """False for expanded or overlapping rows, which must not be overwritten."""
    return logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1]
