"""Log-prob and entropy of labels from vocabulary-parallel logits, with a hand-written backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dapo.loss.logits_blocks import check_logits, rows_are_apart
from megatron_dapo.loss.shards import RowVisitor, VocabShard


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
    check_logits(logits, targets)
    shard = VocabShard.of(logits.shape[1], tp_group, real_vocab_size)
    shard.check_labels(targets)
    visitor = RowVisitor(
        shard, temperature=temperature, with_entropy=with_entropy, chunk_tokens=chunk_tokens
    )
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, visitor, inplace_backward)
    return logprobs, entropy


class _VocabParallelLogprobs(torch.autograd.Function):
    """Two visits; see `vocab_parallel_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, visitor: RowVisitor, inplace: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = visitor.merge(visitor.statistics(logits, targets), targets)
        ctx.visitor, ctx.inplace = visitor, inplace
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, rows.peak, rows.sumexp, rows.entropy)
        visitor.release()
        return rows.logprobs, rows.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None
        logits, targets, *rows = ctx.saved_tensors
        gradient = ctx.visitor.gradient(targets, *rows, grad_logprobs, grad_entropy)
        inplace = ctx.inplace and rows_are_apart(logits)
        out = logits.detach() if inplace else torch.empty_like(logits)
        ctx.visitor.write_gradient(logits, targets, gradient, out=out)
        ctx.visitor.release()
        return out, None, None, None
