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
from megatron_dapo.types import NO_LABEL


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
    incoming_scale: Tensor | float | None = None,
    chunk_tokens: int | None = None,
) -> FusedTerms:
    """Loss sum, log-probs, entropy and metrics of one micro-batch (DAPO Eq. 8, CISPO).

    The numbers are those of `policy_loss` on `vocab_parallel_logprobs`; the gradient is formed
    here, and backward only scales it by the gradient that comes in. With `incoming_scale` it is
    scaled here too, and the weight's goes straight into `main_grad`: then call backward once.

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
        loss_mask: [tokens] bool; logits, hidden states and other floats may be NaN where it is
            False.
        temperature, real_vocab_size: as in `vocab_parallel_logprobs`.
        rollout_logprobs, reference_logprobs: [tokens] fp32, where the config needs them.
        token_weights: [tokens] float64, `Ledger.token_weights`; None: 1 (aggregation = token_mean).
        denominator: int64 scalar for the metrics, `Ledger.denominator`; None: counted tokens.
        main_grad: fp32 [vocab / tp, hidden] that the gradient of `weight` is added to: here if
            `incoming_scale` is known, else in backward, whatever inputs it is asked for. Autograd
            gets none.
        incoming_scale: the gradient that `loss_sum` will receive, where the caller knows it;
            None: backward waits for it.
        chunk_tokens: rows of a block; None: what suits the device.

    Raises:
        ValueError: a config that needs whole responses before any gradient, an input that the
            config needs is missing, shapes differ, float16 without `incoming_scale`, or (on CPU) a
            token that trains has no label.
        RuntimeError: in backward, another gradient arrives than `incoming_scale`, or a second one.
    """
    _check_token_level(config, token_weights)
    per_token = {
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "rollout_logprobs": rollout_logprobs,
        "reference_logprobs": reference_logprobs,
    }
    check_shapes(loss_mask, targets=targets, token_weights=token_weights, **per_token)
    _check_tokens(logits_or_hidden, targets, loss_mask, incoming_scale)
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
    scale = None if incoming_scale is None else torch.as_tensor(incoming_scale)
    accumulator = None if scale is None else main_grad
    with torch.no_grad():
        source: LogitsBlocks | HeadBlocks
        if weight is None:
            source = LogitsBlocks(logits_or_hidden, targets, chunk_tokens)
        else:
            check_head(logits_or_hidden, weight, targets, tp_group, sequence_parallel, main_grad)
            source = HeadBlocks(logits_or_hidden, weight, tp_group, sequence_parallel, chunk_tokens)
        source.start_gradient(hidden=learns[0], weight=learns[1], accumulator=accumulator)
        score = _Score(inputs, weights, config, scale) if any(learns) else None
        found = _visit(source, visitor, targets, score)
        if denominator is None:
            denominator = loss_mask.sum()
        scored = inputs.block(slice(None), *found)
        terms = sum_losses(scored, weights, denominator, config)
        formed = _Formed(*source.gradients(), main_grad, scale)
    loss_sum = _FormedGradient.apply(terms.loss_sum, logits_or_hidden, weight, formed)
    return FusedTerms(loss_sum, *found, terms.metrics)


class _Score(NamedTuple):
    """What turns a block's log-probs into the gradient of the loss."""

    inputs: TokenInputs
    weights: Tensor
    config: LossConfig
    scale: Tensor | None  # of the gradient, where known beforehand

    @torch.enable_grad()
    def coefficients(
        self, rows: slice, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """scale * d loss_sum / d logprobs of a block and, with an entropy bonus, / d entropy.

        Autograd differentiates the very formulas of `loss.objectives` on these few numbers.
        """
        leaves = [logprobs.detach().requires_grad_()]
        if self.config.entropy_coef > 0:
            leaves.append(entropy.detach().requires_grad_())
        block = self.inputs.block(rows, leaves[0], leaves[-1])
        losses = token_losses(block, block.log_ratio, block.log_weight, self.config)
        weighted = losses.total * torch.where(block.mask, self.weights[rows], 0.0)
        outer = None if self.scale is None else self.scale.to(weighted)
        grads = torch.autograd.grad(weighted.sum(), leaves, outer)
        return grads[0], grads[1] if self.config.entropy_coef > 0 else None


def _visit(
    source: LogitsBlocks | HeadBlocks, visitor: RowVisitor, targets: Tensor, score: _Score | None
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every token, and on the way every block's gradient."""
    logprobs, entropies = [], []
    for rows in source.blocks():
        logits, labels = source.logits(rows), targets[rows]
        found = visitor.merge(visitor.statistics(logits, labels), labels)
        assert found.entropy is not None, "the visitor was built with_entropy"
        logprobs.append(found.logprobs)
        entropies.append(found.entropy)
        if score is None:
            continue
        grads = score.coefficients(rows, found.logprobs, found.entropy)
        gradient = visitor.gradient(labels, found.peak, found.sumexp, found.entropy, *grads)
        out = source.gradient_of(rows, logits)
        visitor.write_gradient(logits, labels, gradient, out=out)
        source.add_gradient(rows, out, gradient.active)
    return torch.cat(logprobs), torch.cat(entropies)


class _Formed(NamedTuple):
    """Gradients that the visit has formed."""

    input: Tensor | None
    weight: Tensor | None  # `main_grad` itself where it was added to there
    main_grad: Tensor | None
    scale: Tensor | None  # what they are multiplied by already; None: by nothing


class _FormedGradient(torch.autograd.Function):
    """A loss whose gradients exist already: backward hands them out."""

    @staticmethod
    def forward(
        ctx: Any, loss_sum: Tensor, source: Tensor, weight: Tensor | None, formed: _Formed
    ) -> Tensor:
        ctx.weight, ctx.main_grad, ctx.scale = weight, formed.main_grad, formed.scale
        ctx.accumulated = formed.weight is not None and formed.weight is formed.main_grad
        ctx.spent = False
        ctx.save_for_backward(formed.input, None if ctx.accumulated else formed.weight)
        return loss_sum.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        grad_input, grad_weight = ctx.saved_tensors
        if ctx.scale is None:
            grad_input, grad_weight = _scaled(grad_input, incoming), _scaled(grad_weight, incoming)
        else:
            _check_incoming(incoming, ctx.scale, spent=ctx.spent)
            ctx.spent = True
        if ctx.accumulated:
            grad_weight = deliver_weight_gradient(ctx.main_grad, ctx.weight, ctx.main_grad)
        elif grad_weight is not None:
            if ctx.main_grad is not None:
                ctx.main_grad.add_(grad_weight)
            grad_weight = deliver_weight_gradient(grad_weight, ctx.weight, ctx.main_grad)
        return None, grad_input, grad_weight, None


def _check_incoming(incoming: Tensor, scale: Tensor, *, spent: bool) -> None:
    """Raises RuntimeError unless the gradients were formed for just this backward.

    On a device the values are compared there, without a wait: it stops at the comparison.
    """
    if spent:
        raise RuntimeError(
            "a second backward through policy_cross_entropy with incoming_scale: the gradient of "
            "the weight was added to main_grad once, when it was formed"
        )
    if incoming.is_cpu and incoming != scale:
        raise RuntimeError(
            f"policy_cross_entropy formed its gradients for incoming_scale={scale.item()}, but "
            f"loss_sum receives {incoming.item()}: pass the factor that the loss is multiplied by "
            "before backward (Megatron: its loss scale), or None"
        )
    if not incoming.is_cpu:
        torch._assert_async(
            incoming == scale, "policy_cross_entropy: loss_sum does not receive incoming_scale"
        )


def _scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """gradient * factor, in place. The factor is looked at only where that costs no wait."""
    if gradient is None or (factor.is_cpu and factor == 1.0):
        return gradient
    return gradient.mul_(factor)


def _check_tokens(
    source: Tensor, targets: Tensor, loss_mask: Tensor, incoming_scale: Tensor | float | None
) -> None:
    if source.dtype == torch.float16 and incoming_scale is None:
        raise ValueError(
            "float16 without incoming_scale: gradients below 6e-8 vanish when they are formed, "
            "before a loss scale could lift them; pass the loss scale, or use bfloat16"
        )
    if targets.is_cpu and (orphans := (loss_mask & (targets == NO_LABEL)).nonzero()).numel():
        raise ValueError(
            f"loss_mask is True at token {int(orphans[0])}, which has no label: a token that "
            "trains needs one; clear loss_mask where targets are NO_LABEL"
        )


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
