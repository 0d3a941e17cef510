"""One update in every layout equals one update of transformers and torch on a single process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from megatron_dapo.config.schema import RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.types import MicroBatch, RolloutBatch
from tests.parallel.policy_cases import (
    build_policy,
    drift,
    model_of,
    pack,
    reference_logprobs,
    reference_update,
    rollout_batch,
    run_config,
    sequences,
    update_loss,
    worst_weight_error,
)
from tests.ranks import run_ranks

LOGPROB_TOLERANCE = 1e-4
UPDATE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    family: str
    micro_batches: int
    parallel: dict[str, object] = field(default_factory=dict)
    recompute: str = "none"
    responses: int = 8


ONE_RANK = (
    Case("qwen2", 1),
    Case("qwen2_tied", 2),
    Case("qwen3", 4),
    Case("qwen3_moe", 2),
    Case("llama", 1),
    Case("qwen3", 2, {"distributed_optimizer": False}),
    Case("qwen3", 1, recompute="full"),
    Case("qwen3_moe", 1, recompute="selective"),
)
TWO_RANKS = (
    Case("qwen3", 1, {"tensor": 2}),
    Case("qwen2", 4, {"tensor": 2}),
    Case("qwen3", 2, {"tensor": 2, "sequence_parallel": False}),
    Case("qwen2_tied", 2, {"tensor": 2}),
    Case("qwen2_tied", 4, {"pipeline": 2}),
    Case("qwen3", 1, {"pipeline": 2}),
    Case("qwen3", 2, {"data": 2}),
    Case("qwen2", 1, {"data": 2, "distributed_optimizer": False}),
    Case("qwen2", 2, {"data": 2}, responses=1),  # one data rank has nothing but padding
    Case("qwen2", 2, {"context": 2}),
    Case("qwen3", 1, {"context": 2}, recompute="selective"),
    # 8: with fewer micro-batches, batched messages under gloo happen to arrive in order
    Case("qwen3", 8, {"pipeline": 2, "virtual_pipeline": 2}),
    Case("qwen3_moe", 4, {"pipeline": 2, "virtual_pipeline": 2}),
    Case("qwen3_moe", 2, {"data": 2, "expert": 2}),
    Case("qwen3_moe", 1, {"tensor": 2, "expert": 2}),
    Case("qwen3_moe", 2, {"tensor": 2, "expert_tensor": 2}),
    Case("qwen3_moe", 1, {"context": 2, "expert": 2}),
)
FOUR_RANKS = (
    Case("qwen3", 4, {"tensor": 2, "pipeline": 2}),
    Case("qwen2", 2, {"tensor": 2, "context": 2}),
    Case("qwen2_tied", 2, {"pipeline": 2, "data": 2}),
    Case("qwen3_moe", 2, {"tensor": 2, "data": 2, "expert": 2}),
    Case("qwen3", 2, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
)


def _walk(rank: int, world: int, cases: tuple[Case, ...]) -> None:
    for case in cases:
        config = run_config(recompute=case.recompute, **case.parallel)
        parallel = ParallelContext.create(config.parallel, seed=3)
        _check_case(case, config, parallel)
        parallel.destroy()


def _check_case(case: Case, config: RunConfig, parallel: ParallelContext) -> None:
    model = model_of(case.family)
    batch = rollout_batch(model.config.vocab_size, responses=case.responses)
    policy = build_policy(config, model, parallel)
    scored, _ = policy.logprobs(pack(batch, config, parallel, case.micro_batches))
    if parallel.is_last_stage:
        _check_logprobs(case, scored, model, batch, config)
        scored = [drift(micro_batch) for micro_batch in scored]
    result = policy.update(scored)
    loss = update_loss(result)
    expected_loss, expected_norm = reference_update(model, batch, config)
    found = {
        "loss": abs(loss - expected_loss) / abs(expected_loss),
        "grad norm": abs(result.grad_norm - expected_norm) / expected_norm,
        "weights": worst_weight_error(policy, model),
    }
    assert max(found.values()) <= UPDATE_TOLERANCE, f"{case}: relative errors {found}"


def _check_logprobs(
    case: Case,
    scored: list[MicroBatch],
    model: PreTrainedModel,
    batch: RolloutBatch,
    config: RunConfig,
) -> None:
    rows = list(sequences(batch))
    for micro_batch in scored:
        assert micro_batch.old_logprobs is not None
        for number, row in enumerate(micro_batch.rows.tolist()):
            tokens, _ = rows[row]
            with torch.no_grad():
                expected = reference_logprobs(model, tokens, config.rollout.temperature)
            start = int(micro_batch.cu_seqlens[number])
            found = micro_batch.old_logprobs[start : start + expected.numel()]
            error = float((found - expected).abs().max())
            assert error <= LOGPROB_TOLERANCE, f"{case}, row {row}: log-probs off by {error}"


def test_one_rank_updates_like_transformers() -> None:
    run_ranks(1, _walk, ONE_RANK)


def test_two_ranks_update_like_transformers_in_every_layout() -> None:
    run_ranks(2, _walk, TWO_RANKS)


def test_four_ranks_update_like_transformers_in_combined_layouts() -> None:
    run_ranks(4, _walk, FOUR_RANKS)
