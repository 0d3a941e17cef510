"""Policy loss of one micro-batch in plain torch: DAPO, GRPO, Dr.GRPO, GSPO, CISPO.

It returns a weighted sum and the number that it is to be divided by, never a mean; who divides,
and why once, is in `loss.denominators`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config.loss_checks import sequence_ratio_problems
from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.denominators import Ledger
from megatron_dapo.loss.loss_metrics import LOSS_METRICS, loss_metrics
from megatron_dapo.loss.objectives import (
    SEQUENCE_MISMATCHES,
    TokenInputs,
    token_losses,
    uses_whole_sequences,
)
from megatron_dapo.observability.metrics import Metric

__all__ = ["LOSS_METRICS", "LossTerms", "policy_loss"]


class LossTerms(NamedTuple):
    """What Megatron's loss callback returns: loss of an update = sum loss_sum / sum denominator."""

    loss_sum: Tensor  # scalar, carries gradient
    denominator: Tensor  # int64 scalar
    metrics: dict[str, Metric]  # names and kinds of LOSS_METRICS


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    *,
    num_sequences: int,
    config: LossConfig,
    group_index: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    cp_group: dist.ProcessGroup | None = None,
    token_weights: Tensor | None = None,
    denominator: Tensor | None = None,
) -> LossTerms:
    """Loss sum, denominator and metric sums of one micro-batch (DAPO Eq. 8; GSPO; CISPO).

    With ratio = sequence a response's ratio is s = exp(mean log-ratio of its counted tokens), in
    the form detach(s) * pi / detach(pi) at each token: GSPO's gradient without a collective.

    Every rank of `cp_group` calls, each with its own tokens of the same responses, and holds its
    own part of the sums. Communicates: where the config needs whole responses, one all-reduce of
    [num_sequences, 2] float64 (3 with mismatch weights), else only to derive the token weights.

    Args:
        logprobs: [tokens] fp32, current policy. Carries gradient.
        old_logprobs: [tokens] fp32, trainer's policy before the first update of this rollout.
        advantages: [tokens] fp32.
        loss_mask: [tokens] bool, True on tokens that train; elsewhere the floats may be NaN.
        sequence_index: [tokens] int64, 0 .. num_sequences - 1; any index where masked.
        group_index: [tokens] int64 from 0; needed by aggregation = group_token_mean.
        rollout_logprobs: [tokens] fp32, the engine's; needed by `config.mismatch`.
        reference_logprobs: [tokens] fp32; needed by `config.kl_coef` > 0.
        entropy: [tokens] fp32; carries gradient only with `config.entropy_coef` > 0.
        token_weights: [tokens] float64, `Ledger.token_weights` of this micro-batch.
        denominator: int64 scalar, `Ledger.denominator` of this micro-batch. Without these two
            the given tokens (of all ranks of `cp_group`) are taken for the whole update.

    Raises:
        ValueError: shapes differ, an input that the config needs is missing, or ratio = sequence
            comes with settings that are a token ratio's.
    """
    for problem in sequence_ratio_problems(config):
        raise ValueError(problem)
    per_token = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "rollout_logprobs": rollout_logprobs,
        "reference_logprobs": reference_logprobs,
        "entropy": entropy,
    }
    check_shapes(
        loss_mask,
        **per_token,
        sequence_index=sequence_index,
        group_index=group_index,
        token_weights=token_weights,
    )
    if token_weights is None or denominator is None:
        update = _WholeUpdate.of(loss_mask, sequence_index, num_sequences, group_index, config)
        ledger = update.ledger(config, cp_group)
        token_weights, denominator = ledger.token_weights(update), ledger.denominator(update)
    inputs = TokenInputs.masked(loss_mask, **per_token)
    if not uses_whole_sequences(config):
        return sum_losses(inputs, token_weights, denominator, config)
    responses = _Responses.of(inputs, sequence_index, num_sequences, config, cp_group)
    log_ratio = log_weight = clip_weights = None
    if config.ratio == "sequence":
        clip_weights = torch.where(loss_mask, 1.0 / responses.tokens, 0.0)
        log_ratio = responses.mean_log_ratio + (inputs.logprobs - inputs.logprobs.detach())
    if config.mismatch in ("tis_sequence", "sequence_mask"):
        log_weight = responses.sum_log_weight
    elif config.mismatch == "geometric":
        log_weight = responses.mean_log_weight
    return sum_losses(
        inputs,
        token_weights,
        denominator,
        config,
        log_ratio=log_ratio,
        log_weight=log_weight,
        clip_weights=clip_weights,
    )


def sum_losses(
    inputs: TokenInputs,
    token_weights: Tensor,
    denominator: Tensor,
    config: LossConfig,
    *,
    log_ratio: Tensor | None = None,
    log_weight: Tensor | None = None,
    clip_weights: Tensor | None = None,
) -> LossTerms:
    """Weighted sum of the tokens' losses, and their metrics.

    Args:
        token_weights: [tokens] float64; may be NaN where masked.
        log_ratio: [tokens], carries gradient; None: each token's own.
        log_weight: [tokens], for the mismatch weights; None: each token's own.
        clip_weights: [tokens] float64, what a token adds to a clip fraction; None: one.
    """
    losses = token_losses(
        inputs,
        inputs.log_ratio if log_ratio is None else log_ratio,
        inputs.log_weight if log_weight is None else log_weight,
        config,
    )
    weights = torch.where(inputs.mask, token_weights, 0.0)
    metrics = loss_metrics(
        inputs,
        losses,
        weights=weights,
        denominator=denominator,
        clip_weights=inputs.mask.double() if clip_weights is None else clip_weights,
    )
    loss_sum = (losses.total * weights).sum().to(losses.total.dtype)
    return LossTerms(loss_sum, denominator, metrics)


def check_shapes(loss_mask: Tensor, **tensors: Tensor | None) -> None:
    """Raises ValueError unless every tensor is [tokens] like `loss_mask`, which is bool."""
    if loss_mask.dim() != 1 or loss_mask.dtype != torch.bool:
        raise ValueError(
            f"loss_mask is {loss_mask.dtype} {tuple(loss_mask.shape)}: need bool [tokens]; "
            "flatten [batch, seq] and compare with 0 first"
        )
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != loss_mask.shape:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} must match loss_mask {tuple(loss_mask.shape)}: "
                "one value a token; expand values of a response over its tokens first"
            )


@dataclass(frozen=True)
class _WholeUpdate:
    """The given tokens as the only pack of an update, as the ledger reads it."""

    loss_mask: Tensor
    sequence_index: Tensor
    group_index: Tensor
    rows: Tensor
    num_sequences: int

    @classmethod
    def of(
        cls,
        loss_mask: Tensor,
        sequence_index: Tensor,
        num_sequences: int,
        group_index: Tensor | None,
        config: LossConfig,
    ) -> _WholeUpdate:
        if group_index is None:
            if config.aggregation == "group_token_mean":
                raise ValueError(
                    "group_index is None but loss.aggregation=group_token_mean divides by the "
                    "tokens of each group; pass [tokens] int64"
                )
            group_index = torch.zeros_like(sequence_index)
        sequences = torch.where(loss_mask, sequence_index, 0)
        groups = torch.where(loss_mask, group_index, 0)
        rows = torch.arange(num_sequences, device=loss_mask.device)
        return cls(loss_mask, sequences, groups, rows, num_sequences)

    def ledger(self, config: LossConfig, cp_group: dist.ProcessGroup | None) -> Ledger:
        return Ledger.from_micro_batches([self], config, dp_cp_group=cp_group, cp_group=cp_group)


@dataclass(frozen=True)
class _Responses:
    """What each token needs of its whole response: [tokens], without gradient."""

    tokens: Tensor  # float64, counted tokens, at least 1
    mean_log_ratio: Tensor
    sum_log_weight: Tensor | None
    mean_log_weight: Tensor | None

    @classmethod
    def of(
        cls,
        inputs: TokenInputs,
        sequence_index: Tensor,
        num_sequences: int,
        config: LossConfig,
        cp_group: dist.ProcessGroup | None,
    ) -> _Responses:
        """Sums over responses in float64; one all-reduce over `cp_group` for all of them.

        Each sum runs over its tokens in order: the same numbers in every run, on every device.
        """
        log_ratio, mask = inputs.log_ratio.detach(), inputs.mask
        log_weight = inputs.log_weight if config.mismatch in SEQUENCE_MISMATCHES else None
        columns = [mask, log_ratio] if log_weight is None else [mask, log_ratio, log_weight]
        index = torch.where(mask, sequence_index, 0)
        values = torch.stack([column.double() for column in columns], dim=1)
        lengths = torch.zeros(max(num_sequences, 1), dtype=torch.int64, device=mask.device)
        lengths.index_add_(0, index, torch.ones_like(index))
        in_order = values[index.argsort(stable=True)]
        sums = torch.segment_reduce(in_order, "sum", lengths=lengths, unsafe=True)
        if cp_group is not None and dist.get_world_size(cp_group) > 1:
            dist.all_reduce(sums, group=cp_group)
        tokens, ratio_sum, *weight_sum = sums[index].unbind(1)
        tokens, dtype = tokens.clamp(min=1.0), log_ratio.dtype
        mean_log_ratio = (ratio_sum / tokens).to(dtype)
        if not weight_sum:
            return cls(tokens, mean_log_ratio, None, None)
        mean_weight = (weight_sum[0] / tokens).to(dtype)
        return cls(tokens, mean_log_ratio, weight_sum[0].to(dtype), mean_weight)
