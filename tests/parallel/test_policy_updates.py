"""What an update does beside the plain case: bad gradients, BF16, KL, MoE routers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_dapo.batch.packing import context_slice
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.observability.metrics import reduce_bags
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.policy import POLICY_METRICS, Policy
from megatron_dapo.types import MicroBatch, RolloutBatch
from tests.collectives import recorded_collectives
from tests.parallel.fused_cases import every_loss_has_one_value
from tests.parallel.moe_cases import (
    a_bias_chooses_experts_and_does_not_weigh_them,
    aux_losses_weigh_what_the_config_says,
    handed_balance_is_what_updates_add,
)
from tests.parallel.policy_cases import (
    OBJECTIVES,
    build_policy,
    drift,
    model_of,
    pack,
    reference_update,
    rollout_batch,
    run_config,
    update_loss,
)
from tests.ranks import run_ranks


def _walk(rank: int, world: int, checks: tuple[Callable[..., None], ...]) -> None:
    for check in checks:
        check(world)


def _scored(
    policy: Policy, batch: RolloutBatch, config: RunConfig, micro_batches: int = 2
) -> list[MicroBatch]:
    """Micro-batches of this rank, ready for an update off the old policy."""
    packs, _ = policy.logprobs(pack(batch, config, policy.parallel, micro_batches))
    return [drift(p) for p in packs] if policy.parallel.is_last_stage else packs


def _weights(policy: Policy) -> list[Tensor]:
    return [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _bad_gradients_leave_no_trace(world: int) -> None:
    layouts = [{"data": 2}, {"data": 2, "distributed_optimizer": False}, {"tensor": 2}]
    for layout in [*layouts, {"pipeline": 2}]:
        config = run_config(**layout)
        parallel = ParallelContext.create(config.parallel, seed=3)
        model = model_of("qwen3")
        policy = build_policy(config, model, parallel)
        good = _scored(policy, rollout_batch(512), config)
        before = _weights(policy)
        for value in (math.nan, math.inf):
            bad = [m.replace(advantages=m.advantages.clone()) for m in good]
            if parallel.dp_rank == parallel.dp_size - 1:  # one data rank alone is poisoned
                bad[0].advantages[bad[0].loss_mask] = value
            result = policy.update(bad)
            assert result.skipped and not math.isfinite(result.grad_norm), layout
            assert _same(before, _weights(policy)), f"{layout}: a skipped update moved weights"
            values = reduce_bags(result.metrics, POLICY_METRICS, parallel.control_group).values()
            assert values["actor/skipped_steps"] == 1 and "actor/grad_norm" not in values
        policy.update(good)
        fresh = build_policy(config, model, parallel)
        fresh.update(good)
        assert _same(_weights(policy), _weights(fresh)), f"{layout}: a skipped update left a trace"
        parallel.destroy()


def _nothing_to_train_is_no_update(world: int) -> None:
    config = run_config(data=world)
    parallel = ParallelContext.create(config.parallel, seed=3)
    policy = build_policy(config, model_of("qwen2"), parallel)
    packs = _scored(policy, rollout_batch(512), config)
    before = _weights(policy)
    result = policy.update([m.replace(loss_mask=torch.zeros_like(m.loss_mask)) for m in packs])
    assert result.skipped and result.grad_norm == 0.0
    assert _same(before, _weights(policy))
    parallel.destroy()


def _unequal_micro_batches_are_refused(world: int) -> None:
    config = run_config(data=world)
    parallel = ParallelContext.create(config.parallel, seed=3)
    policy = build_policy(config, model_of("qwen2"), parallel)
    packs = pack(rollout_batch(512), config, parallel, 2)
    with pytest.raises(ValueError, match="equally many"):
        policy.logprobs(packs[: 1 + parallel.dp_rank])
    parallel.destroy()


def _bf16_keeps_fp32_masters(world: int) -> None:
    """A step far below BF16's resolution is lost in the weights, and kept in the masters."""
    for layout in ({"data": 2}, {"tensor": 2}, {"data": 2, "distributed_optimizer": False}):
        config = run_config(dtype="bfloat16", **layout)
        parallel = ParallelContext.create(config.parallel, seed=3)
        model = model_of("qwen3")
        policy = build_policy(config, model, parallel)
        packs = _scored(policy, rollout_batch(512), config)
        result = policy.update(packs)
        loss, norm = reference_update(model, rollout_batch(512), config)
        assert update_loss(result) == pytest.approx(loss, rel=0.1), layout
        assert result.grad_norm == pytest.approx(norm, rel=0.1), layout
        masters = [p for group in policy.optimizer.param_groups for p in group["params"]]
        assert masters and all(p.dtype == torch.float32 for p in masters), layout
        assert all(p.dtype == torch.bfloat16 for p in _weights(policy)), layout
        parallel.destroy()


def _reference_policy_stays_the_start(world: int) -> None:
    for layout in ({"data": 2}, {"pipeline": 2}):
        config = run_config(loss={"kl_coef": 0.5}, **layout)
        parallel = ParallelContext.create(config.parallel, seed=3)
        policy = build_policy(config, model_of("qwen3"), parallel)
        packs = pack(rollout_batch(512), config, parallel, 2)
        first, _ = policy.logprobs(packs)
        policy.update(first)
        moved = _weights(policy)
        second, _ = policy.logprobs(packs)
        assert _same(moved, _weights(policy)), "scoring the reference changed the policy"
        if parallel.is_last_stage:
            for a, b in zip(first, second, strict=True):
                assert a.old_logprobs is not None and a.reference_logprobs is not None
                assert b.old_logprobs is not None and b.reference_logprobs is not None
                assert torch.equal(a.reference_logprobs, a.old_logprobs)
                assert torch.equal(b.reference_logprobs, a.reference_logprobs)
                if a.num_sequences:
                    assert not torch.equal(b.old_logprobs, a.old_logprobs)
        values = reduce_bags(
            policy.update(second).metrics, POLICY_METRICS, parallel.control_group
        ).values()
        assert values["actor/kl_loss"] > 0
        parallel.destroy()


def _metrics_count_each_token_once(world: int) -> None:
    batch = rollout_batch(512)
    seen: list[dict[str, float]] = []
    for layout in ({"data": 2}, {"tensor": 2}, {"context": 2}, {"pipeline": 2}):
        config = run_config(**layout)
        parallel = ParallelContext.create(config.parallel, seed=3)
        policy = build_policy(config, model_of("qwen3"), parallel)
        scored, bag = policy.logprobs(pack(batch, config, parallel, 2))
        bag.update(policy.update(scored).metrics.metrics)
        reduced = reduce_bags(bag, POLICY_METRICS, parallel.control_group)
        count = float(reduced.metrics["training/rollout_probs_diff_mean"].count)
        assert count == int(batch.response_tokens[batch.trained].sum()), layout
        seen.append(reduced.values())
        parallel.destroy()
    assert set(seen[0]) >= {"actor/entropy", "actor/lr", "actor/grad_norm", "training/rollout_kl"}
    for values in seen[1:]:
        assert values == pytest.approx(seen[0], rel=1e-4, abs=1e-6)


def _context_ranks_exchange_two_numbers_a_response(world: int) -> None:
    """GSPO's ratio needs no more of the other context ranks, and its backward nothing: beside
    what a token's ratio with the same denominator communicates over the whole update."""
    batch, outcomes = rollout_batch(512), []
    token_ratio = {"aggregation": "sequence_mean"}
    recorded: dict[str, Counter[tuple[str, tuple[int, ...]]]] = {}
    for layout in ({"data": 2}, {"context": 2}):
        for name, loss in (("token", token_ratio), ("gspo", OBJECTIVES["gspo"])):
            config = run_config(loss=loss, **layout)
            parallel = ParallelContext.create(config.parallel, seed=3)
            policy = build_policy(config, model_of("qwen2"), parallel)
            packs = _scored(policy, batch, config)
            with recorded_collectives() as calls:
                result = policy.update(packs)
            recorded[name] = Counter((call.name, call.shape) for call in calls)
            if name == "gspo":
                outcomes.append((update_loss(result), result.grad_norm))
            uneven = parallel.cp_size == 2 and _uneven(packs, parallel)
            parallel.destroy()
    assert uneven, "the batch is to split some response unevenly"
    sums = Counter(("all_reduce", (max(p.num_sequences, 1), 2)) for p in packs)
    assert recorded["gspo"] - recorded["token"] == sums
    assert not recorded["token"] - recorded["gspo"]
    assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-6)


def _uneven(packs: list[MicroBatch], parallel: ParallelContext) -> bool:
    for pack_ in packs:
        own = [context_slice(pack_, rank, parallel.cp_size) for rank in range(parallel.cp_size)]
        counts = [p.sequence_index[p.loss_mask].bincount(minlength=p.num_sequences) for p in own]
        if not torch.equal(*counts):
            return True
    return False


def test_updates_on_one_rank() -> None:
    checks = (
        aux_losses_weigh_what_the_config_says,
        handed_balance_is_what_updates_add,
        a_bias_chooses_experts_and_does_not_weigh_them,
        every_loss_has_one_value,
    )
    run_ranks(1, _walk, checks)


def test_updates_on_two_ranks() -> None:
    checks = (
        _bad_gradients_leave_no_trace,
        _nothing_to_train_is_no_update,
        _unequal_micro_batches_are_refused,
        _bf16_keeps_fp32_masters,
        _reference_policy_stays_the_start,
        _metrics_count_each_token_once,
        _context_ranks_exchange_two_numbers_a_response,
        aux_losses_weigh_what_the_config_says,
        handed_balance_is_what_updates_add,
    )
    run_ranks(2, _walk, checks)


@pytest.mark.slow
def test_aux_losses_on_four_ranks() -> None:
    checks = (aux_losses_weigh_what_the_config_says, handed_balance_is_what_updates_add)
    run_ranks(4, _walk, checks)
