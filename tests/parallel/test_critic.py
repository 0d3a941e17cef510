"""One update of the critic in every layout equals one of transformers and torch on one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron_dapo.checkpoint.commit import step_folder
from megatron_dapo.checkpoint.state import load_checkpoint, save_checkpoint
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.observability.metrics import reduce_bags
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.critic import CRITIC_METRICS, Critic
from megatron_dapo.policy.policy import Policy
from megatron_dapo.types import MicroBatch, RolloutBatch
from tests.parallel.leftovers import dissolve
from tests.parallel.policy_cases import (
    build_policy,
    every_layout,
    hf_parts,
    model_of,
    pack,
    reference_step,
    rollout_batch,
    run_config,
    sequences,
    update_loss,
    world_size,
    worst_weight_error,
)
from tests.ranks import run_ranks

SUM_TOLERANCE = 1e-6
"""Relative, of loss and gradient norm."""
WEIGHT_TOLERANCE = 1e-6
"""Of a weight, relative to the largest of its tensor."""
RESUME_TOLERANCE = 1e-5
"""Relative, of gradient norms some updates later."""
SEEDS = (7, 17, 27)
WIDTH, GAMMA, LAM = 0.3, 0.95, 0.9


@dataclass(frozen=True)
class Case:
    family: str
    micro_batches: int
    parallel: Mapping[str, object] = field(default_factory=dict)
    responses: int = 8


ONE_RANK = (Case("qwen2", 1), Case("qwen2_tied", 4))
TWO_RANKS = (
    Case("qwen3", 2, {"tensor": 2}),
    Case("qwen2_tied", 2, {"tensor": 2, "sequence_parallel": False}),
    Case("qwen2_tied", 4, {"pipeline": 2}),
    Case("qwen3", 8, {"pipeline": 2, "virtual_pipeline": 2}),
    Case("qwen3", 2, {"data": 2}),
    Case("qwen2", 1, {"data": 2, "distributed_optimizer": False}),
    Case("qwen2", 2, {"data": 2}, responses=1),  # one data rank has nothing but padding
    Case("qwen2", 2, {"context": 2}),
    Case("qwen3_moe", 2, {"data": 2, "expert": 2}),
    Case("qwen3_moe", 1, {"tensor": 2, "expert": 2}),
)
FOUR_RANKS = (
    Case("qwen2_tied", 4, {"tensor": 2, "pipeline": 2}),
    Case("qwen3", 2, {"data": 2, "context": 2}),
)


def _config(layout: Mapping[str, object]) -> RunConfig:
    """The critic's learning rate is that of the policy, as in `reference_step`."""
    plain = run_config(**layout)
    changes = {
        "advantage": {"estimator": "gae", "gamma": GAMMA, "lam": LAM},
        "critic": {"lr": plain.optimizer.lr, "clip_width": WIDTH},
    }
    return RunConfig.model_validate(plain.model_dump() | changes)


def _model(family: str) -> PreTrainedModel:
    """A transformers model with a value head that is not 0, so that all weights have gradients."""
    model = model_of(family)
    width = model.config.hidden_size
    model.value_head = nn.Linear(width, 1, bias=False)
    with torch.no_grad():
        model.value_head.weight.copy_(torch.sin(2.1 * torch.arange(width))[None] / 4)
    return model


def _build(
    config: RunConfig, model: PreTrainedModel, parallel: ParallelContext
) -> tuple[Policy, Critic]:
    policy = build_policy(config, model, parallel)
    critic = Critic.build(config, model.config, parallel)
    critic.start_from(policy.chunks)
    return policy, critic


def _give_head(critic: Critic, model: PreTrainedModel) -> None:
    if critic.parallel.is_last_stage:
        with torch.no_grad():
            critic.chunks[-1].output_layer.weight.copy_(model.value_head.weight)
    critic.optimizer.reload_model_params()


def _drift(micro_batch: MicroBatch) -> MicroBatch:
    """Old values moved by a fixed pattern, so that some tokens clip."""
    assert micro_batch.values is not None
    row = micro_batch.rows[micro_batch.sequence_index] if micro_batch.num_sequences else 0
    return micro_batch.replace(values=micro_batch.values + _pattern(micro_batch.position_ids, row))


def _pattern(positions: Tensor, row: Tensor | int) -> Tensor:
    return 0.8 * torch.sin(1.7 * positions + 0.9 * row)


@dataclass
class _Reference:
    """Row -> [response tokens] float64; `values` carry gradient."""

    values: dict[int, Tensor]
    advantages: dict[int, Tensor]
    returns: dict[int, Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, batch: RolloutBatch) -> _Reference:
        values, raw, returns = {}, {}, {}
        for row, (tokens, answer) in enumerate(sequences(batch)):
            if not batch.trained[row]:
                continue
            hidden = model.model(tokens[None]).last_hidden_state
            values[row] = model.value_head(hidden)[0, answer, 0].double()
            found, after, advantage = values[row].tolist(), 0.0, 0.0
            found_advantages = []
            for t in reversed(range(len(found))):
                reward = batch.rewards[row].item() if t == len(found) - 1 else 0.0
                advantage = reward + GAMMA * after - found[t] + GAMMA * LAM * advantage
                after = found[t]
                found_advantages.insert(0, advantage)
            raw[row] = torch.tensor(found_advantages, dtype=torch.float64)
            returns[row] = raw[row] + values[row].detach()
        every = torch.cat(list(raw.values()))
        scale = every.std() if every.numel() > 1 else 1.0
        return cls(values, {r: (own - every.mean()) / scale for r, own in raw.items()}, returns)

    def loss(self, batch: RolloutBatch) -> tuple[Tensor, float]:
        """Clipped value loss off the drifted values, and the share of clipped tokens."""
        free, bounded = [], []
        for row, (tokens, answer) in enumerate(sequences(batch)):
            if row not in self.values:
                continue
            new, target = self.values[row], self.returns[row]
            old = new.detach() + _pattern(torch.arange(tokens.numel())[answer], row)
            free.append(0.5 * (new - target) ** 2)
            bounded.append(0.5 * (old + (new - old).clamp(-WIDTH, WIDTH) - target) ** 2)
        a, b = torch.cat(free), torch.cat(bounded)
        return torch.maximum(a, b).mean(), (b > a + 1e-6).double().mean().item()


def _every_case(world: int) -> list[Case]:
    """Every layout of `world` ranks, dense and MoE."""
    return [
        Case(family, (1, 2, 4)[number % 3], layout)
        for family in ("qwen2_tied", "qwen3_moe")
        for number, layout in enumerate(every_layout(moe=family == "qwen3_moe"))
        if world_size(layout) == world
    ]


def _walk(rank: int, world: int, cases: Sequence[Case], folder: Path | None = None) -> None:
    for number, case in enumerate(cases):
        config = _config(case.parallel)
        parallel = ParallelContext.create(config.parallel, seed=3)
        _check_case(case, config, parallel, seed=SEEDS[number % len(SEEDS)])
        parallel.destroy()
    if folder is not None:
        _resumes_in_another_layout(folder / "resume")
        _bad_gradients_leave_no_trace()


def _check_case(case: Case, config: RunConfig, parallel: ParallelContext, seed: int) -> None:
    model = _model(case.family)
    batch = rollout_batch(model.config.vocab_size, responses=case.responses, seed=seed)
    policy, critic = _build(config, model, parallel)
    packs = pack(batch, config, parallel, case.micro_batches, order=seed)
    if parallel.is_last_stage:
        for micro_batch in critic.values(packs):
            assert micro_batch.values is not None and not micro_batch.values.any(), case
    else:
        assert critic.values(packs) == packs, case
    _give_head(critic, model)
    critic.start_step(1)
    (ready,) = critic.advantages([critic.values(packs)])
    expected = _Reference.of(model, batch)
    if parallel.is_last_stage:
        _check_advantages(case, ready, expected)
        ready = [_drift(micro_batch) for micro_batch in ready]
    result = critic.update(ready)
    loss, clipped = expected.loss(batch)
    loss.backward()
    norm = reference_step(model, config.optimizer)
    sums = {
        "loss": abs(update_loss(result, "critic/vf_loss") / loss.item() - 1),
        "grad norm": abs(result.grad_norm / norm - 1),
    }
    weights = worst_weight_error(critic, model)
    assert max(sums.values()) <= SUM_TOLERANCE, f"{case}, seed {seed}: relative errors {sums}"
    assert weights <= WEIGHT_TOLERANCE, f"{case}, seed {seed}: weights off by {weights}"
    metrics = reduce_bags(result.metrics, CRITIC_METRICS, parallel.control_group).values()
    assert metrics.keys() == CRITIC_METRICS.keys(), case
    assert metrics["critic/vf_clipfrac"] == pytest.approx(clipped), case
    assert clipped > 0 or case.responses == 1, "the case is to clip some tokens"
    dissolve(policy)
    dissolve(critic)


def _check_advantages(case: Case, packs: list[MicroBatch], expected: _Reference) -> None:
    for micro_batch in packs:
        assert micro_batch.returns is not None and micro_batch.values is not None
        for number, row in enumerate(micro_batch.rows.tolist()):
            mine = micro_batch.loss_mask & (micro_batch.sequence_index == number)
            for name, wanted in (
                ("values", expected.values),
                ("advantages", expected.advantages),
                ("returns", expected.returns),
            ):
                found = getattr(micro_batch, name)[mine].double()
                if row in wanted:
                    error = (found - wanted[row]).abs().max()
                    assert error <= 1e-4, f"{case}, row {row}: {name} off by {float(error)}"
                else:
                    assert not found.numel(), f"{case}, row {row} does not train"


def _updates(critic: Critic, vocab_size: int, steps: range) -> list[float]:
    norms = []
    for step in steps:
        critic.start_step(step)
        packs = pack(rollout_batch(vocab_size), critic.config, critic.parallel, 4)
        (ready,) = critic.advantages([critic.values(packs)])
        norms.append(critic.update(ready).grad_norm)
    return norms


def _resumes_in_another_layout(folder: Path) -> None:
    saved_by, loaded_by = {"data": 2}, {"tensor": 2}
    config = _config(saved_by)
    parallel = ParallelContext.create(config.parallel, seed=3)
    model = _model("qwen3")
    vocab_size = model.config.vocab_size
    policy, critic = _build(config, model, parallel)
    _updates(critic, vocab_size, range(1, 3))
    for step, kept in ((2, critic), (3, None)):
        save_checkpoint(
            folder,
            step,
            chunks=policy.chunks,
            optimizer=policy.optimizer,
            state={},
            parallel=parallel,
            keep=2,
            critic=kept,
        )
    wanted = _updates(critic, vocab_size, range(3, 5))
    parallel.destroy()

    config = _config(loaded_by)
    parallel = ParallelContext.create(config.parallel, seed=4)
    policy, critic = _build(config, model, parallel)
    _updates(critic, vocab_size, range(1, 2))  # other weights and moments than those saved

    def load(step: int) -> None:
        load_checkpoint(
            step_folder(folder, step),
            chunks=policy.chunks,
            optimizer=policy.optimizer,
            parallel=parallel,
            critic=critic,
        )

    with pytest.raises(ValueError, match="holds no critic"):
        load(3)
    load(2)
    assert _updates(critic, vocab_size, range(3, 5)) == pytest.approx(wanted, rel=RESUME_TOLERANCE)
    parallel.destroy()


def _bad_gradients_leave_no_trace() -> None:
    config = _config({"data": 2})
    parallel = ParallelContext.create(config.parallel, seed=3)
    model = _model("qwen3")
    policy, critic = _build(config, model, parallel)
    packs = pack(rollout_batch(model.config.vocab_size), config, parallel, 2)
    (ready,) = critic.advantages([critic.values(packs)])
    poisoned = [m.replace(returns=torch.full((m.num_tokens,), math.nan)) for m in ready]
    before = [parameter.detach().clone() for parameter, _ in hf_parts(critic, model)]
    result = critic.update(poisoned if parallel.dp_rank else ready)
    assert result.skipped and math.isnan(result.grad_norm)
    after = [parameter for parameter, _ in hf_parts(critic, model)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(RuntimeError, match="no values or returns"):
        critic.update(packs)
    assert all(torch.equal(parameter, value) for parameter, value in hf_parts(policy, model)), (
        "the critic's updates moved the policy"
    )
    parallel.destroy()


def test_one_rank_updates_like_transformers() -> None:
    run_ranks(1, _walk, ONE_RANK)


def test_two_ranks_update_like_transformers_in_every_layout(tmp_path: Path) -> None:
    run_ranks(2, _walk, TWO_RANKS, tmp_path)


def test_four_ranks_update_like_transformers_in_combined_layouts() -> None:
    run_ranks(4, _walk, FOUR_RANKS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
def test_every_layout_updates_like_transformers(world: int) -> None:
    run_ranks(world, _walk, _every_case(world))
