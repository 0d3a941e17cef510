"""Log-prob and entropy of labels straight from hidden states; logits exist one block at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dapo.loss.head_blocks import HeadBlocks, check_head, deliver_weight_gradient
from megatron_dapo.loss.shards import RowVisitor, VocabShard


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    real_vocab_size: int | None = None,
    with_entropy: bool = True,
    chunk_tokens: int | None = None,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each label and entropy of its distribution, both [tokens] fp32.

    The same as `vocab_parallel_logprobs(hidden @ weight.T, ...)` with logits of `chunk_tokens`
    rows at most, in forward and in backward: backward multiplies anew, four products in all.
    Both results carry gradient to `hidden` and `weight`; one that needs none costs nothing.

    Every rank of `tp_group` calls with its rows of the weight and the same targets, and holds the
    same result. Communicates: one all-gather of 4 floats a token in forward, one all-reduce of
    the gradient of `hidden` in backward; with `sequence_parallel` an all-gather of `hidden` in
    both and a reduce-scatter instead of the all-reduce.

    Args:
        hidden: [tokens, hidden], the same on every rank; with `sequence_parallel` [tokens / tp,
            hidden], rank r holding the r-th part. The logits have its dtype.
        weight: [vocab / tp, hidden]; output layer or tied embedding; rank r holds ids
            r * vocab/tp and on.
        targets: [tokens] int64 token ids of all tokens, or NO_LABEL (-100).
        temperature: divides the logits after the upcast to fp32; the rollout's temperature.
        real_vocab_size: ids from here on are padding: excluded, zero gradient.
        with_entropy: False returns None for the entropy and saves its pass.
        chunk_tokens: rows of a block; None: what suits the device.
        main_grad: fp32 [vocab / tp, hidden] that the gradient of `weight` is added to (Megatron's
            fused accumulation); autograd then gets none.

    Raises:
        ValueError: shapes, temperature, real_vocab_size, or (on CPU) a label out of range.
    """
    check_head(hidden, weight, targets, tp_group, sequence_parallel, main_grad)
    shard = VocabShard.of(weight.shape[0], tp_group, real_vocab_size)
    shard.check_labels(targets)
    visitor = RowVisitor(shard, temperature=temperature, with_entropy=with_entropy)
    options = _Options(visitor, tp_group, sequence_parallel, chunk_tokens, main_grad)
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, targets, options)
    return logprobs, entropy


class _Options(NamedTuple):
    visitor: RowVisitor
    tp_group: dist.ProcessGroup | None
    sequence_parallel: bool
    chunk_tokens: int | None
    main_grad: Tensor | None

    def head(self, hidden: Tensor, weight: Tensor) -> HeadBlocks:
        return HeadBlocks(hidden, weight, self.tp_group, self.sequence_parallel, self.chunk_tokens)


class _LinearLogprobs(torch.autograd.Function):
    """See `linear_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        head, visitor = options.head(hidden, weight), options.visitor
        parts = [visitor.statistics(head.logits(r), targets[r]) for r in head.blocks()]
        rows = visitor.merge(torch.cat(parts, dim=1), targets)
        ctx.options, ctx.weight = options, weight
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, rows.peak, rows.sumexp, rows.entropy)
        visitor.release()
        return rows.logprobs, rows.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None
        hidden, weight, targets, *rows = ctx.saved_tensors
        options, needs = ctx.options, ctx.needs_input_grad
        visitor = options.visitor
        gradient = visitor.gradient(targets, *rows, grad_logprobs, grad_entropy)
        head = options.head(hidden, weight)
        head.start_gradient(hidden=needs[0], weight=needs[1], accumulator=options.main_grad)
        for block in head.blocks():
            logits = head.logits(block)
            rows_gradient, out = gradient.block(block), head.gradient_of(block, logits)
            visitor.write_gradient(logits, targets[block], rows_gradient, out=out)
            head.add_gradient(block, out, rows_gradient.active)
        visitor.release()
        grad_hidden, grad_weight = head.gradients()
        if grad_weight is not None:
            grad_weight = deliver_weight_gradient(grad_weight, ctx.weight, options.main_grad)
        return grad_hidden, grad_weight, None, None
