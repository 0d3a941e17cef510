"""The policy loss inside the cross-entropy: a row's gradient is formed while its logits are there.

A token-level loss needs nothing of a token but its own log-prob and entropy, so log-prob, ratio,
clip, coefficient and d loss / d logits of a block of rows follow one another before the next block
is touched. From hidden states that leaves three matrix products: logits, and one for each gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.head_blocks import HeadBlocks, check_head, deliver_weight_gradient
from megatron_dapo.loss.logits_blocks import LogitsBlocks
from megatron_dapo.loss.objectives import TokenInputs, token_losses, uses_whole_sequences
from megatron_dapo.loss.policy_loss import check_shapes, sum_losses
from megatron_dapo.loss.shards import RowVisitor, VocabShard
from megatron_dapo.observability.metrics import Metric


class FusedTerms(NamedTuple):
    """Result of one micro-batch."""

    loss_sum: Tensor  # scalar, carries gradient
    logprobs: Tensor  # [tokens] fp32, no gradient
    entropy: Tensor  # [tokens] fp32, no gradient
    metrics: dict[str, Metric]  # names and kinds of LOSS_METRICS


def policy_cross_entropy(
    logits_or_hidden: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    config: LossConfig,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    real_vocab_size: int | None = None,
    rollout_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    token_weights: Tensor | None = None,
    denominator: Tensor | None = None,
    main_grad: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> FusedTerms:
    """Loss sum, log-probs, entropy and metrics of one micro-batch (DAPO Eq. 8, CISPO).

    The numbers are those of `policy_loss` on `vocab_parallel_logprobs`; the gradient is formed
    here, and backward only scales it by the gradient that comes in.

    Every rank of `tp_group` calls with its part of the vocabulary and the same tokens, and holds
    the same result. Communicates: one all-gather of 4 floats a token for each block of rows; from
    hidden states also one all-reduce of their gradient, or with `sequence_parallel` an all-gather
    before and a reduce-scatter after. Nothing in backward.

    Args:
        logits_or_hidden: with `weight` None logits [tokens, vocab / tp], overwritten by their
            gradient if they need one; else hidden [tokens, hidden] ([tokens / tp, hidden] with
            `sequence_parallel`). Carries gradient.
        weight: [vocab / tp, hidden] of the output layer, or None. Carries gradient.
        targets: [tokens] int64 token ids, or NO_LABEL (-100).
        old_logprobs, advantages: [tokens] fp32.
        loss_mask: [tokens] bool; logits and other floats may be NaN where it is False (hidden
            states may not: they are factors of the weight's gradient).
        temperature, real_vocab_size: as in `vocab_parallel_logprobs`.
        rollout_logprobs, reference_logprobs: [tokens] fp32, where the config needs them.
        token_weights: [tokens] fp32, `Ledger.token_weights`; None: 1 (aggregation = token_mean).
        denominator: int64 scalar for the metrics, `Ledger.denominator`; None: counted tokens.
        main_grad: fp32 [vocab / tp, hidden] that backward adds the gradient of `weight` to.
        chunk_tokens: rows of a block; None: what suits the device.

    Raises:
        ValueError: a config that needs whole responses before any gradient, an input that the
            config needs is missing, or shapes differ.
    """
    _check_token_level(config, token_weights)
    per_token = {
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "rollout_logprobs": rollout_logprobs,
        "reference_logprobs": reference_logprobs,
    }
    check_shapes(loss_mask, targets=targets, token_weights=token_weights, **per_token)
    inputs = TokenInputs.masked(loss_mask, logprobs=torch.zeros_like(old_logprobs), **per_token)
    weights = loss_mask.float() if token_weights is None else token_weights
    width = logits_or_hidden.shape[1] if weight is None else weight.shape[0]
    shard = VocabShard.of(width, tp_group, real_vocab_size)
    shard.check_labels(targets)
    visitor = RowVisitor(shard, temperature=temperature, with_entropy=True)
    learns = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (logits_or_hidden, weight)
    ]
    with torch.no_grad():
        source: LogitsBlocks | HeadBlocks
        if weight is None:
            source = LogitsBlocks(logits_or_hidden, targets, chunk_tokens)
        else:
            check_head(logits_or_hidden, weight, targets, tp_group, sequence_parallel, main_grad)
            source = HeadBlocks(logits_or_hidden, weight, tp_group, sequence_parallel, chunk_tokens)
        source.start_gradient(hidden=learns[0], weight=learns[1])
        found = _visit(source, visitor, targets, inputs, weights, config, learns=any(learns))
        if denominator is None:
            denominator = loss_mask.sum()
        scored = inputs.block(slice(None), *found)
        terms = sum_losses(scored, weights, denominator, config)
        formed = source.gradients()
    loss_sum = _FormedGradient.apply(terms.loss_sum, logits_or_hidden, weight, *formed, main_grad)
    return FusedTerms(loss_sum, *found, terms.metrics)


def _visit(
    source: LogitsBlocks | HeadBlocks,
    visitor: RowVisitor,
    targets: Tensor,
    inputs: TokenInputs,
    weights: Tensor,
    config: LossConfig,
    *,
    learns: bool,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every token, and on the way every block's gradient."""
    logprobs, entropies = [], []
    for rows in source.blocks():
        logits, labels = source.logits(rows), targets[rows]
        found = visitor.merge(visitor.statistics(logits, labels), labels)
        assert found.entropy is not None, "the visitor was built with_entropy"
        logprobs.append(found.logprobs)
        entropies.append(found.entropy)
        if not learns:
            continue
        grads = _coefficients(inputs, rows, found.logprobs, found.entropy, weights[rows], config)
        gradient = visitor.gradient(labels, found.peak, found.sumexp, found.entropy, *grads)
        visitor.write_gradient(logits, labels, gradient, out=logits)
        source.add_gradient(rows, logits)
    return torch.cat(logprobs), torch.cat(entropies)


@torch.enable_grad()
def _coefficients(
    inputs: TokenInputs,
    rows: slice,
    logprobs: Tensor,
    entropy: Tensor,
    weights: Tensor,
    config: LossConfig,
) -> tuple[Tensor, Tensor | None]:
    """d loss_sum / d logprobs and, with an entropy bonus, / d entropy of a block, [rows].

    Autograd differentiates the very formulas of `loss.objectives` on these few numbers.
    """
    leaves = [logprobs.detach().requires_grad_()]
    if config.entropy_coef > 0:
        leaves.append(entropy.detach().requires_grad_())
    block = inputs.block(rows, leaves[0], leaves[-1])
    losses = token_losses(block, block.log_ratio, block.log_weight, config)
    weighted = losses.total * torch.where(block.mask, weights, 0.0)
    grads = torch.autograd.grad(weighted.sum(), leaves)
    return grads[0], grads[1] if config.entropy_coef > 0 else None


class _FormedGradient(torch.autograd.Function):
    """A loss whose gradients exist already: backward scales them by the gradient that comes in."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_sum: Tensor,
        logits_or_hidden: Tensor,
        weight: Tensor | None,
        grad_input: Tensor | None,
        grad_weight: Tensor | None,
        main_grad: Tensor | None,
    ) -> Tensor:
        ctx.weight, ctx.main_grad = weight, main_grad
        ctx.save_for_backward(grad_input, grad_weight)
        return loss_sum.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        grad_input, grad_weight = (_scaled(grad, incoming) for grad in ctx.saved_tensors)
        if grad_weight is not None:
            if ctx.main_grad is not None:
                ctx.main_grad.add_(grad_weight)
            grad_weight = deliver_weight_gradient(grad_weight, ctx.weight, ctx.main_grad)
        return None, grad_input, grad_weight, None, None, None


def _scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """gradient * factor, in place. The factor is looked at only where that costs no wait."""
    if gradient is None or (factor.is_cpu and factor == 1.0):
        return gradient
    return gradient.mul_(factor)


def _check_token_level(config: LossConfig, token_weights: Tensor | None) -> None:
    if uses_whole_sequences(config):
        raise ValueError(
            f"loss.ratio={config.ratio} with loss.mismatch={config.mismatch} needs the log-probs "
            "of whole responses before any gradient, but here a block's gradient is formed at "
            "once; use vocab_parallel_logprobs or linear_logprobs with policy_loss"
        )
    if token_weights is None and config.aggregation != "token_mean":
        raise ValueError(
            f"loss.aggregation={config.aggregation} weighs tokens: pass "
            "token_weights=Ledger.token_weights(micro_batch)"
        )
