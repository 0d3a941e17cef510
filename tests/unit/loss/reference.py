"""The losses once more, written from their papers: float64, response by response, no tricks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dapo.config.schema import LossConfig


@dataclass
class Batch:
    """Packed inputs of the product, float64, with `logprobs` and `entropy` leaves."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    sequence_index: Tensor
    group_index: Tensor
    rollout_logprobs: Tensor
    reference_logprobs: Tensor
    entropy: Tensor
    num_sequences: int

    def optional(self) -> dict[str, Tensor]:
        names = ("group_index", "rollout_logprobs", "reference_logprobs", "entropy")
        return {name: getattr(self, name) for name in names}

    def required(self) -> tuple[Tensor, ...]:
        names = ("logprobs", "old_logprobs", "advantages", "loss_mask", "sequence_index")
        return tuple(getattr(self, name) for name in names)


def random_batch(
    seed: int,
    lengths: tuple[int, ...] = (5, 1, 7, 3, 4, 6, 3, 2, 1),
    groups: tuple[int, ...] = (0, 0, 1, 1, 2, 2, 2, 3, 3),
    *,
    silent: tuple[int, ...] = (6, 7, 8),
    spread: float = 0.5,
    padding: int = 3,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Responses back to back, then padding. Masked are padding, the first token of longer
    responses, and those of `silent`: a member of group 2, and all of group 3."""
    g = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
    )
    index = torch.cat([index, torch.zeros(padding, dtype=torch.int64)])
    tokens = index.numel()
    mask = torch.ones(tokens, dtype=torch.bool)
    start = 0
    for number, length in enumerate(lengths):
        mask[start] = length < 4
        if number in silent:
            mask[start : start + length] = False
        start += length
    mask[start:] = False

    def normal(scale: float) -> Tensor:
        return torch.randn(tokens, generator=g, dtype=torch.float64) * scale

    old = -normal(1.0).abs() - 0.1
    advantages = torch.randn(len(lengths), generator=g, dtype=torch.float64)[index]
    values = {
        "logprobs": old + normal(spread),
        "old_logprobs": old,
        "advantages": advantages,
        "rollout_logprobs": old + normal(0.3),
        "reference_logprobs": old + normal(0.3),
        "entropy": normal(1.0).abs(),
    }
    batch = Batch(
        **{name: value.to(dtype) for name, value in values.items()},
        loss_mask=mask,
        sequence_index=index,
        group_index=torch.tensor(groups, dtype=torch.int64)[index],
        num_sequences=len(lengths),
    )
    batch.logprobs.requires_grad_()
    batch.entropy.requires_grad_()
    return batch


def in_float64(batch: Batch) -> Batch:
    """The same numbers in float64, with leaves of their own."""
    wide = {
        name: value.detach().double()
        for name, value in vars(batch).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    copy = replace(batch, **wide)
    copy.logprobs.requires_grad_()
    copy.entropy.requires_grad_()
    return copy


def reference_loss(batch: Batch, config: LossConfig) -> Tensor:
    """The loss of an update that is exactly this batch, float64 scalar with gradient."""
    groups: dict[int, list[Tensor]] = {}
    means, sums, all_tokens = [], [], []
    for i in range(batch.num_sequences):
        where = (batch.sequence_index == i) & batch.loss_mask
        losses = _response_losses(batch, where, config)
        sums.append(losses.sum())
        if losses.numel():
            all_tokens.append(losses)
            means.append(losses.mean())
            groups.setdefault(int(batch.group_index[where][0]), []).append(losses)
    nothing = batch.logprobs.sum() * 0.0
    if config.aggregation == "constant":
        return torch.stack(sums).sum() / (len(sums) * config.constant_tokens)
    if not all_tokens:
        return nothing
    if config.aggregation == "token_mean":
        return torch.cat(all_tokens).mean()
    if config.aggregation == "sequence_mean":
        return torch.stack(means).mean()
    return torch.stack([torch.cat(members).mean() for members in groups.values()]).mean()


def _response_losses(batch: Batch, where: Tensor, config: LossConfig) -> Tensor:
    new, old, a = batch.logprobs[where], batch.old_logprobs[where], batch.advantages[where]
    if config.ratio == "sequence":
        ratio = (new - old).mean().exp().expand_as(new) if new.numel() else new
        # GSPO-token: the response's ratio, each token's own gradient
        ratio = ratio.detach() * (new - new.detach()).exp()
    else:
        ratio = (new - old).exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    clipped = torch.clamp(ratio, low, high)
    if config.objective == "cispo":
        loss = -clipped.detach() * a * new
    else:
        objective = torch.min(ratio * a, clipped * a)
        if config.dual_clip is not None:
            capped = torch.max(objective, config.dual_clip * a)
            objective = torch.where(a < 0, capped, objective)
        loss = -objective
    loss = loss * _mismatch_weights(old - batch.rollout_logprobs[where], config)
    if config.kl_coef:
        loss = loss + config.kl_coef * _kl(new, batch.reference_logprobs[where], config)
    return loss - config.entropy_coef * batch.entropy[where]


def _mismatch_weights(log_weight: Tensor, config: LossConfig) -> Tensor:
    low, high = config.mismatch_low, config.mismatch_high
    token, whole = log_weight.exp(), log_weight.sum().exp()
    mean = log_weight.mean().exp() if log_weight.numel() else whole
    inside = {"icepop": token, "sequence_mask": whole, "geometric": mean}
    if config.mismatch == "none":
        return torch.ones_like(token)
    if config.mismatch == "tis_token":
        return token.clamp(max=high)
    if config.mismatch == "tis_sequence":
        return whole.clamp(max=high).expand_as(token)
    weight = inside[config.mismatch].expand_as(token)
    return weight * ((weight >= low) & (weight <= high))


def _kl(new: Tensor, reference: Tensor, config: LossConfig) -> Tensor:
    d = reference - new
    return {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[config.kl_estimator]
