"""Every objective x aggregation x mismatch correction against the float64 reference."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from torch import Tensor

from megatron_dapo.config.loss_checks import loss_problems, sequence_ratio_problems
from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.objectives import kl_penalty, surrogate
from megatron_dapo.loss.policy_loss import LOSS_METRICS, LossTerms, policy_loss
from megatron_dapo.observability.metrics import MetricBag
from tests.unit.loss.reference import Batch, in_float64, random_batch, reference_loss

OBJECTIVES = {
    "dapo": {},
    "dual_clip": {"dual_clip": 1.3},
    "gspo": {
        "ratio": "sequence",
        "clip_low": 0.05,
        "clip_high": 0.06,
        "aggregation": "sequence_mean",
    },
    "cispo": {"objective": "cispo", "clip_low": 0.9, "clip_high": 0.4},
    "grpo_k1": {"kl_coef": 0.04, "kl_estimator": "k1"},
    "grpo_k2": {"kl_coef": 0.04, "kl_estimator": "k2"},
    "grpo_k3": {"kl_coef": 0.04, "kl_estimator": "k3"},
    "entropy_bonus": {"entropy_coef": 0.01},
}
AGGREGATIONS = {
    "token_mean": {"aggregation": "token_mean"},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "group_token_mean": {"aggregation": "group_token_mean"},
    "constant": {"aggregation": "constant", "constant_tokens": 9},
}
MISMATCH = {
    "none": {},
    "tis_token": {"mismatch_high": 1.1},
    "tis_sequence": {"mismatch_high": 1.1},
    "icepop": {"mismatch_low": 0.8, "mismatch_high": 1.2},
    "sequence_mask": {"mismatch_low": 0.6, "mismatch_high": 1.6},
    "geometric": {"mismatch_low": 0.9, "mismatch_high": 1.1},
}


def product(*mismatches: str) -> list[object]:
    """Configs of every objective x aggregation x one of `mismatches`; GSPO has one aggregation."""
    return [
        pytest.param(
            LossConfig(**(OBJECTIVES[o] | AGGREGATIONS[a] | MISMATCH[m]), mismatch=m),
            id=f"{o}-{a}-{m}",
        )
        for o, a, m in itertools.product(OBJECTIVES, AGGREGATIONS, mismatches)
        if o != "gspo" or a == "sequence_mean"
    ]


def run(batch: Batch, config: LossConfig) -> LossTerms:
    return policy_loss(
        *batch.required(), num_sequences=batch.num_sequences, config=config, **batch.optional()
    )


def mean_of(terms: LossTerms) -> Tensor:
    return terms.loss_sum / terms.denominator


def gradients(loss: Tensor, batch: Batch) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [batch.logprobs, batch.entropy], materialize_grads=True))


@pytest.mark.parametrize("config", product(*MISMATCH))
def test_loss_and_gradient_are_the_papers(config: LossConfig) -> None:
    for seed in range(3):
        batch = random_batch(seed)
        loss, expected = mean_of(run(batch, config)), reference_loss(batch, config)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)
        for got, wanted in zip(gradients(loss, batch), gradients(expected, batch), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("config", product(*MISMATCH))
def test_in_fp32_loss_and_gradient_are_those_of_float64(config: LossConfig) -> None:
    for seed in range(3):
        batch = random_batch(seed, dtype=torch.float32)
        exact = in_float64(batch)
        terms, expected = run(batch, config), reference_loss(exact, config)
        assert terms.loss_sum.dtype == torch.float32
        loss = mean_of(terms)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
        for got, wanted in zip(gradients(loss, batch), gradients(expected, exact), strict=True):
            torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_two_runs_are_equal_bit_by_bit(ratio: str) -> None:
    g = torch.Generator().manual_seed(5)
    lengths = tuple(torch.randint(1, 400, (30,), generator=g).tolist())
    groups = tuple(i // 3 for i in range(30))
    objective = OBJECTIVES["gspo" if ratio == "sequence" else "dual_clip"]
    config = LossConfig(**objective, mismatch="tis_sequence", kl_coef=0.1, entropy_coef=0.1)
    results = []
    for _ in range(2):
        batch = random_batch(3, lengths, groups, dtype=torch.float32)
        terms = run(batch, config)
        metrics = torch.tensor(list(MetricBag(dict(terms.metrics)).values().values()))
        results.append([terms.loss_sum, *gradients(terms.loss_sum, batch), metrics])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_the_order_of_responses_in_a_pack_does_not_matter_to_their_sums() -> None:
    """Tokens of a response need not lie together, nor in the order of the responses."""
    config = LossConfig(**OBJECTIVES["gspo"])
    batch = random_batch(6)
    order = torch.randperm(batch.loss_mask.numel(), generator=torch.Generator().manual_seed(1))
    mixed = Batch(
        **{k: v.detach()[order] if isinstance(v, Tensor) else v for k, v in vars(batch).items()}
    )
    mixed.logprobs.requires_grad_()
    mixed.entropy.requires_grad_()
    one, other = run(batch, config), run(mixed, config)
    assert other.loss_sum.item() == pytest.approx(one.loss_sum.item(), rel=1e-12)
    wanted = gradients(one.loss_sum, batch)[0][order]
    torch.testing.assert_close(gradients(other.loss_sum, mixed)[0], wanted)


@pytest.mark.parametrize("mismatch", MISMATCH)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nan_in_masked_positions_changes_nothing(objective: str, mismatch: str) -> None:
    config = LossConfig(**OBJECTIVES[objective], **MISMATCH[mismatch], mismatch=mismatch)
    clean, dirty = random_batch(1), random_batch(1)
    names = ("logprobs", "old_logprobs", "advantages", "rollout_logprobs", "reference_logprobs")
    for name, garbage in zip((*names, "entropy"), [math.nan, math.inf, -math.inf] * 2, strict=True):
        getattr(dirty, name).data[~dirty.loss_mask] = garbage
    one, other = run(clean, config), run(dirty, config)
    assert other.loss_sum.item() == one.loss_sum.item()
    for got, wanted in zip(
        gradients(other.loss_sum, dirty), gradients(one.loss_sum, clean), strict=True
    ):
        assert torch.equal(got, wanted)
        assert (got[~dirty.loss_mask] == 0).all()
    bags = [MetricBag(dict(terms.metrics)).values() for terms in (one, other)]
    assert bags[0] == bags[1]


@pytest.mark.parametrize("config", product("none"))
def test_nothing_to_train_on_is_loss_zero_and_gradient_zero(config: LossConfig) -> None:
    batch = random_batch(2)
    batch.loss_mask[:] = False
    terms = run(batch, config)
    assert terms.loss_sum.item() == 0.0
    responses = batch.num_sequences if config.aggregation == "constant" else 0
    assert int(terms.denominator) == responses
    (gradient,) = torch.autograd.grad(terms.loss_sum, batch.logprobs)
    assert (gradient == 0).all()
    assert "actor/ppo_kl" not in MetricBag(dict(terms.metrics)).values()


def test_no_token_at_all_is_loss_zero() -> None:
    batch = random_batch(0, lengths=(), groups=(0,), padding=0)
    for objective in ("dapo", "gspo"):
        terms = run(batch, LossConfig(**OBJECTIVES[objective], mismatch="tis_sequence"))
        assert terms.loss_sum.item() == 0.0
        assert int(terms.denominator) == 0


def one_token(log_ratio: float, advantage: float, config: LossConfig) -> tuple[float, float]:
    """(loss, d loss / d logprob) of a response of one token."""
    logprobs = torch.tensor([log_ratio - 1.0], dtype=torch.float64, requires_grad=True)
    terms = policy_loss(
        logprobs,
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([True]),
        torch.tensor([0]),
        num_sequences=1,
        config=config,
    )
    (gradient,) = torch.autograd.grad(terms.loss_sum, logprobs)
    return terms.loss_sum.item(), gradient.item()


SEQUENCE = {"ratio": "sequence", "aggregation": "sequence_mean"}


@pytest.mark.parametrize("settings", [{}, {"dual_clip": 3.0}, SEQUENCE])
@pytest.mark.parametrize(
    ("value", "advantage", "loss", "gradient"),
    [
        (1.25, 1.0, -1.25, -1.25),  # between 1 + clip_low and 1 + clip_high: alive
        (1.50, 1.0, -1.28, 0.0),  # above: gone
        (0.50, 1.0, -0.50, -0.50),  # below with A > 0: full gradient
        (0.50, -1.0, 0.80, 0.0),  # below with A < 0: gone
        (1.50, -1.0, 1.50, 1.50),  # above with A < 0: full gradient
        (1.00, 0.0, 0.0, 0.0),
    ],
)
def test_the_clip_removes_the_gradient_only_where_the_paper_says(
    settings: dict[str, object], value: float, advantage: float, loss: float, gradient: float
) -> None:
    got = one_token(math.log(value), advantage, LossConfig(**settings))
    assert got == pytest.approx((loss, gradient), abs=1e-9)


def test_the_dual_clip_removes_the_gradient_of_a_bad_token_that_became_likely() -> None:
    got = one_token(math.log(4.0), -1.0, LossConfig(dual_clip=3.0))
    assert got == pytest.approx((3.0, 0.0), abs=1e-9)


BOUNDS = LossConfig(clip_low=0.5, clip_high=0.5, dual_clip=2.0)
"""Bounds that fp32 and float64 hold exactly."""


def exact_log(ratio: float, dtype: torch.dtype) -> Tensor:
    """A logarithm whose exp is `ratio` to the last bit, [1]."""
    nearest = torch.tensor(ratio, dtype=dtype).log()
    steps = torch.arange(-4, 5) * torch.finfo(dtype).eps * nearest.abs()
    exact = [x for x in nearest + steps.to(dtype) / 2 if x.exp() == ratio]
    return exact[0][None].requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("bound", "advantage", "loss", "gradient"),
    [
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.0, 1.0),
        (1.5, 2.0, -3.0, -3.0),
        (1.5, -2.0, 3.0, 3.0),
        (2.0, 2.0, -3.0, 0.0),  # the dual clip is no bound of a good token, the upper one is
        (2.0, -2.0, 4.0, 4.0),
    ],
)
def test_a_ratio_exactly_at_a_bound_keeps_its_whole_gradient(
    bound: float, advantage: float, loss: float, gradient: float, dtype: torch.dtype
) -> None:
    log_ratio = exact_log(bound, dtype)
    got = surrogate(log_ratio, log_ratio, torch.full_like(log_ratio, advantage), BOUNDS)
    (found,) = torch.autograd.grad(got.loss, log_ratio)
    assert (got.ratio.item(), got.loss.item(), found.item()) == (bound, loss, gradient)
    assert [flag.item() for flag in (got.low, got.dual)] == [False, False]
    assert got.high.item() == (gradient == 0.0)


def test_on_policy_the_gradient_is_minus_the_advantage_however_the_tie_is_cut() -> None:
    for advantage in (-2.0, 0.5):
        assert one_token(0.0, advantage, LossConfig()) == pytest.approx((-advantage, -advantage))


@pytest.mark.parametrize("settings", [{}, SEQUENCE])
@pytest.mark.parametrize("log_ratio", [800.0, -800.0])
def test_a_huge_log_ratio_stays_finite_and_loses_its_gradient(
    settings: dict[str, object], log_ratio: float
) -> None:
    loss, gradient = one_token(log_ratio, -1.0, LossConfig(**settings))
    assert math.isfinite(loss)
    assert gradient == 0.0


@pytest.mark.parametrize("dual_clip", [None, 10.0])
def test_every_gradient_that_is_lost_above_is_counted(dual_clip: float | None) -> None:
    """Without a dual clip, exp's bound of e^20 takes its place, in the metric as in the loss."""
    log_ratio = torch.tensor([19.0, 21.0, 21.0, 0.0], requires_grad=True)
    terms = policy_loss(
        log_ratio,
        torch.zeros(4),
        torch.tensor([-1.0, -1.0, 1.0, 0.5]),
        torch.ones(4, dtype=torch.bool),
        torch.arange(4),
        num_sequences=4,
        config=LossConfig(dual_clip=dual_clip),
    )
    (gradient,) = torch.autograd.grad(terms.loss_sum, log_ratio)
    values = MetricBag(dict(terms.metrics)).values()
    lost = values["actor/pg_clipfrac"] + values["actor/pg_clipfrac/dual"]
    assert lost == (gradient == 0).double().mean().item()
    assert values["actor/pg_clipfrac/high"] == 0.25


def test_a_policy_far_above_its_reference_keeps_the_gradient_of_k3() -> None:
    new = torch.tensor([-0.1, -30.0], requires_grad=True)
    reference = torch.tensor([-40.0, -0.1])
    loss = kl_penalty(new, reference, LossConfig(kl_estimator="k3"))
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert loss.isfinite().all()
    assert loss[0].item() == pytest.approx(38.9)
    assert gradient.tolist() == [1.0, 0.0]  # e^29.9 is past the bound


def test_the_sequence_ratio_ignores_token_ratios_that_cancel() -> None:
    logprobs = torch.tensor([0.0, -2.0], requires_grad=True)
    terms = policy_loss(
        logprobs,
        torch.tensor([-1.0, -1.0]),
        torch.ones(2),
        torch.ones(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.int64),
        num_sequences=1,
        config=LossConfig(
            ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"
        ),
    )
    assert mean_of(terms).item() == pytest.approx(-1.0)
    (gradient,) = torch.autograd.grad(terms.loss_sum, logprobs)
    assert gradient.tolist() == pytest.approx([-0.5, -0.5])


def test_clip_fractions_count_tokens_whose_gradient_died() -> None:
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 20.0, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    mask = torch.ones(6, dtype=torch.bool)
    terms = policy_loss(
        ratios.log().requires_grad_(),
        torch.zeros(6),
        advantages,
        mask,
        torch.arange(6),
        num_sequences=6,
        config=LossConfig(dual_clip=10.0),
    )
    values = MetricBag(dict(terms.metrics)).values()
    assert values["actor/pg_clipfrac"] == pytest.approx(2 / 6)
    for name in ("high", "low", "dual"):
        assert values[f"actor/pg_clipfrac/{name}"] == pytest.approx(1 / 6)
    assert values["actor/ratio_max"] == pytest.approx(20.0)
    assert values["actor/ratio_min"] == pytest.approx(0.5)
    assert values["actor/ppo_kl"] == pytest.approx(-ratios.log().mean().item())
    assert values["actor/sampled_prob"] == pytest.approx(ratios.mean().item())


def test_clip_fractions_of_a_sequence_ratio_count_responses() -> None:
    lengths = torch.tensor([4, 1, 1])
    index = torch.repeat_interleave(torch.arange(3), lengths)
    log_ratio = torch.tensor([1.0, 0.0, 0.0])[index]
    terms = policy_loss(
        log_ratio.requires_grad_(),
        torch.zeros(6),
        torch.ones(6),
        torch.ones(6, dtype=torch.bool),
        index,
        num_sequences=3,
        config=LossConfig(**SEQUENCE),
    )
    metric = terms.metrics["actor/pg_clipfrac/high"]
    assert (float(metric.value), float(metric.count)) == pytest.approx((1.0, 3.0))


def test_metrics_of_micro_batches_merge_to_the_metrics_of_the_update() -> None:
    config = LossConfig(entropy_coef=0.01, kl_coef=0.1, mismatch="tis_token", dual_clip=1.3)
    batch = random_batch(4)
    whole = MetricBag(dict(run(batch, config).metrics)).values()
    merged = MetricBag()
    for chosen in (batch.sequence_index < 2, batch.sequence_index >= 2):
        part = random_batch(4)
        part.loss_mask &= chosen
        merged.update(run(part, config).metrics)
    assert merged.values() == pytest.approx(whole)
    assert set(whole) == set(LOSS_METRICS)
    gap = (batch.old_logprobs - batch.rollout_logprobs)[batch.loss_mask].abs()
    assert whole["training/mismatch_mean"] == pytest.approx(gap.mean().item())
    assert whole["training/mismatch_max"] == pytest.approx(gap.max().item())
    assert whole["actor/entropy"] == pytest.approx(batch.entropy[batch.loss_mask].mean().item())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mismatch": "tis_token"}, "rollout_logprobs"),
        ({"mismatch": "geometric"}, "rollout_logprobs"),
        ({"kl_coef": 0.1}, "reference_logprobs"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"aggregation": "group_token_mean"}, "group_index"),
        ({"aggregation": "constant"}, "constant_tokens"),
    ],
)
def test_a_missing_input_is_named(settings: dict[str, object], message: str) -> None:
    batch = random_batch(0)
    with pytest.raises(ValueError, match=message):
        policy_loss(
            *batch.required(), num_sequences=batch.num_sequences, config=LossConfig(**settings)
        )


def test_a_response_level_advantage_is_refused() -> None:
    batch = random_batch(0)
    batch.advantages = batch.advantages[:6]
    with pytest.raises(ValueError, match=r"advantages \(6,\)"):
        run(batch, LossConfig())


@pytest.mark.parametrize(
    "settings",
    [{"aggregation": "token_mean"}, {"dual_clip": 3.0}, {"objective": "cispo"}],
)
def test_a_sequence_ratio_is_refused_for_the_reason_that_the_config_check_gives(
    settings: dict[str, object],
) -> None:
    config = LossConfig(**(SEQUENCE | settings))
    (reason,) = sequence_ratio_problems(config)
    assert reason in list(loss_problems(config))
    with pytest.raises(ValueError, match=re.escape(reason)):
        run(random_batch(0), config)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_that_is_only_reported_cannot_spoil_the_loss(estimator: str) -> None:
    batch = random_batch(1)
    batch.reference_logprobs[batch.loss_mask] = -math.inf
    terms = run(batch, LossConfig(kl_estimator=estimator))
    plain = run(random_batch(1), LossConfig())
    assert torch.equal(terms.loss_sum, plain.loss_sum)
    assert torch.isfinite(gradients(terms.loss_sum, batch)[0]).all()
