"""The fused path of an update equals the plain one: logits, then log-probs, then the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dapo.loss.denominators import Ledger
from megatron_dapo.loss.policy_loss import LossTerms, policy_loss
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs
from megatron_dapo.observability.metrics import reduce_bags
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.policy import POLICY_METRICS, Policy
from megatron_dapo.types import MicroBatch
from tests.parallel.policy_cases import (
    OBJECTIVES,
    build_policy,
    drift,
    model_of,
    pack,
    rollout_batch,
    run_config,
)

TOLERANCE = 1e-6
"""Relative, of metrics (loss among them), gradient norm and weights."""
SCALE = 8.0
LOSSES: tuple[dict[str, object], ...] = (
    {},
    {"kl_coef": 0.1, "entropy_coef": 0.05, "mismatch": "tis_token", "mismatch_high": 1.1},
    {"objective": "cispo", "aggregation": "sequence_mean"},
    {"aggregation": "group_token_mean", "mismatch": "icepop", "mismatch_low": 0.9},
    {"mismatch": "geometric", "mismatch_low": 0.5, "entropy_coef": 0.05},
    OBJECTIVES["gspo"],
)


class PlainPolicy(Policy):
    """The same policy with whole logits, as autograd sees them."""

    def _loss(self, hidden: Tensor, micro_batch: MicroBatch, ledger: Ledger) -> LossTerms:
        assert micro_batch.old_logprobs is not None
        logprobs, entropy = vocab_parallel_logprobs(
            hidden @ self.chunks[-1].head_weight.T,
            micro_batch.labels,
            temperature=self.config.rollout.temperature,
            real_vocab_size=self.vocab_size,
        )
        return policy_loss(
            logprobs,
            micro_batch.old_logprobs,
            micro_batch.advantages,
            micro_batch.loss_mask,
            micro_batch.sequence_index,
            num_sequences=micro_batch.num_sequences,
            config=self.config.loss,
            group_index=micro_batch.group_index,
            rollout_logprobs=micro_batch.rollout_logprobs,
            reference_logprobs=micro_batch.reference_logprobs,
            entropy=entropy,
            token_weights=ledger.token_weights(micro_batch),
            denominator=ledger.denominator(micro_batch),
        )


def _off_policy(micro_batch: MicroBatch) -> MicroBatch:
    """Old, reference and engine log-probs apart from the policy's, by fixed patterns."""
    moved = drift(micro_batch)
    assert moved.old_logprobs is not None
    positions = moved.position_ids
    changes: dict[str, Any] = {
        "rollout_logprobs": moved.old_logprobs + 0.2 * torch.cos(2.3 * positions)
    }
    if moved.reference_logprobs is not None:
        changes["reference_logprobs"] = moved.reference_logprobs + 0.3 * torch.cos(positions)
    return moved.replace(**changes)


def _update(
    loss: dict[str, object],
    policy_class: type[Policy],
    parallel: ParallelContext,
    scale: float = 1.0,
) -> tuple[Policy, dict[str, float]]:
    config = run_config(loss=loss, clip_grad=1e9)
    policy = build_policy(config, model_of("qwen2_tied"), parallel, policy_class)
    packs, _ = policy.logprobs(pack(rollout_batch(512), config, parallel, 2))
    policy.chunks[0].config.grad_scale_func = lambda value: value * scale
    result = policy.update([_off_policy(micro_batch) for micro_batch in packs])
    assert not result.skipped
    return policy, reduce_bags(result.metrics, POLICY_METRICS, parallel.control_group).values()


def every_loss_has_one_value(world: int) -> None:
    """For every kind of loss, and whatever gradient Megatron's schedule sends back."""
    assert world == 1, "the plain path here holds the whole vocabulary"
    parallel = ParallelContext.create(run_config().parallel, seed=3)
    for loss in LOSSES:
        policy, fused = _update(loss, Policy, parallel)
        plain_policy, plain = _update(loss, PlainPolicy, parallel)
        assert fused == pytest.approx(plain, rel=TOLERANCE, abs=1e-7), loss
        pairs = zip(policy.chunks[0].parameters(), plain_policy.chunks[0].parameters(), strict=True)
        for own, other in pairs:
            error = (own - other).abs().max() / other.abs().max()
            assert error <= TOLERANCE, f"{loss}: {tuple(own.shape)} off by {float(error)}"
    for loss in OBJECTIVES.values():
        _, once = _update(loss, Policy, parallel)
        _, scaled = _update(loss, Policy, parallel, SCALE)
        assert scaled["actor/grad_norm"] == pytest.approx(SCALE * once["actor/grad_norm"]), loss
    parallel.destroy()
