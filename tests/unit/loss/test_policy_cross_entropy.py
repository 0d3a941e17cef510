from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.policy_cross_entropy import FusedTerms, policy_cross_entropy
from megatron_dapo.loss.policy_loss import LossTerms, policy_loss
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs
from megatron_dapo.observability.metrics import MetricBag
from megatron_dapo.types import NO_LABEL

WIDTH, VOCAB, HIDDEN, TOKENS = 40, 33, 8, 19
CONFIGS = {
    "dapo": LossConfig(),
    "dual_clip": LossConfig(dual_clip=1.5),
    "cispo": LossConfig(objective="cispo", clip_low=0.9, clip_high=0.4),
    "kl_k3": LossConfig(kl_coef=0.1),
    "entropy_bonus": LossConfig(entropy_coef=0.05),
    "tis": LossConfig(mismatch="tis_token", mismatch_high=1.1),
    "icepop": LossConfig(mismatch="icepop", mismatch_low=0.8, mismatch_high=1.2),
    "everything": LossConfig(
        dual_clip=1.5, kl_coef=0.1, kl_estimator="k2", entropy_coef=0.05, mismatch="tis_token"
    ),
}


@dataclasses.dataclass
class Tokens:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    loss_mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    reference_logprobs: Tensor
    token_weights: Tensor

    def logits(self) -> Tensor:
        return (self.hidden @ self.weight.t()).detach().requires_grad_()

    def rest(self) -> dict[str, object]:
        """Arguments that both ways of computing share."""
        names = ("rollout_logprobs", "reference_logprobs", "token_weights")
        return {name: getattr(self, name) for name in names}


def case(dtype: torch.dtype = torch.float64) -> Tokens:
    g = torch.Generator().manual_seed(8)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    hidden, weight = normal(TOKENS, HIDDEN), normal(WIDTH, HIDDEN)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    loss_mask = torch.rand(TOKENS, generator=g) < 0.8
    targets[4], loss_mask[4] = NO_LABEL, False
    logprobs, _ = vocab_parallel_logprobs(hidden @ weight.t(), targets, **VIEW)
    old = logprobs + 0.3 * normal(TOKENS)
    floats = [old, normal(TOKENS), old + 0.2 * normal(TOKENS), old + 0.2 * normal(TOKENS)]
    return Tokens(
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        targets,
        loss_mask,
        *[x.to(torch.promote_types(dtype, torch.float32)) for x in floats],
        token_weights=torch.rand(TOKENS, generator=g),
    )


VIEW = {"temperature": 0.7, "real_vocab_size": VOCAB}


def two_steps(logits: Tensor, data: Tokens, config: LossConfig) -> tuple[LossTerms, Tensor, Tensor]:
    logprobs, entropy = vocab_parallel_logprobs(
        logits, data.targets, inplace_backward=False, **VIEW
    )
    terms = policy_loss(
        logprobs,
        data.old_logprobs,
        data.advantages,
        data.loss_mask,
        torch.zeros_like(data.targets),
        num_sequences=1,
        config=config,
        entropy=entropy,
        denominator=torch.tensor(7),
        **data.rest(),
    )
    return terms, logprobs, entropy


def fused(
    logits_or_hidden: Tensor,
    weight: Tensor | None,
    data: Tokens,
    config: LossConfig,
    **more: object,
) -> FusedTerms:
    return policy_cross_entropy(
        logits_or_hidden,
        weight,
        data.targets,
        data.old_logprobs,
        data.advantages,
        data.loss_mask,
        config=config,
        denominator=torch.tensor(7),
        **data.rest(),
        **VIEW,
        **more,
    )


def values(terms: FusedTerms | LossTerms) -> dict[str, float]:
    return MetricBag(dict(terms.metrics)).values()


@pytest.mark.parametrize("chunk_tokens", [1, 6, None])
@pytest.mark.parametrize("name", CONFIGS)
def test_from_logits_it_equals_policy_loss_on_logprobs(name: str, chunk_tokens: int | None) -> None:
    data, config = case(), CONFIGS[name]
    logits = data.logits()
    terms, logprobs, entropy = two_steps(logits, data, config)
    (wanted,) = torch.autograd.grad(3 * terms.loss_sum, logits)
    one = fused(logits, None, data, config, chunk_tokens=chunk_tokens)
    assert one.loss_sum.item() == pytest.approx(terms.loss_sum.item(), abs=1e-12)
    torch.testing.assert_close(one.logprobs, logprobs.detach())
    torch.testing.assert_close(one.entropy, entropy.detach())
    assert values(one) == pytest.approx(values(terms))
    (grad,) = torch.autograd.grad(3 * one.loss_sum, logits)
    torch.testing.assert_close(grad, wanted, atol=1e-12, rtol=1e-10)
    assert grad.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("chunk_tokens", [1, 6, None])
@pytest.mark.parametrize("name", CONFIGS)
def test_from_hidden_states_it_equals_policy_loss_on_logprobs(
    name: str, chunk_tokens: int | None
) -> None:
    data, config = case(), CONFIGS[name]
    terms, _, _ = two_steps(data.hidden @ data.weight.t(), data, config)
    leaves = [data.hidden, data.weight]
    wanted = torch.autograd.grad(3 * terms.loss_sum, leaves)
    one = fused(data.hidden, data.weight, data, config, chunk_tokens=chunk_tokens)
    assert one.loss_sum.item() == pytest.approx(terms.loss_sum.item(), abs=1e-12)
    assert values(one) == pytest.approx(values(terms))
    for grad, right in zip(torch.autograd.grad(3 * one.loss_sum, leaves), wanted, strict=True):
        torch.testing.assert_close(grad, right, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precision_stays_near_float64(dtype: torch.dtype, error: float) -> None:
    config = LossConfig(clip_low=5.0, clip_high=5.0)  # no clip that rounding could flip
    exact, data = case(), case(dtype)
    terms, _, _ = two_steps(exact.hidden @ exact.weight.t(), exact, config)
    wanted = torch.autograd.grad(terms.loss_sum, [exact.hidden, exact.weight])
    one = fused(data.hidden, data.weight, data, config)
    assert one.loss_sum.item() == pytest.approx(terms.loss_sum.item(), rel=error)
    got = torch.autograd.grad(one.loss_sum, [data.hidden, data.weight])
    for grad, right in zip(got, wanted, strict=True):
        assert grad.dtype == dtype
        bound = error * right.abs().max().item()
        torch.testing.assert_close(grad.double(), right, atol=bound, rtol=0)


def test_nan_in_masked_positions_changes_nothing() -> None:
    clean, dirty, config = case(), case(), CONFIGS["everything"]
    masked = ~dirty.loss_mask
    for name in ("old_logprobs", "advantages", "rollout_logprobs", "reference_logprobs"):
        getattr(dirty, name)[masked] = math.nan
    dirty.token_weights[masked] = math.nan
    results = []
    for data in (clean, dirty):
        terms = fused(data.hidden, data.weight, data, config, chunk_tokens=6)
        grads = torch.autograd.grad(terms.loss_sum, [data.hidden, data.weight])
        logits = data.logits()
        if data is dirty:
            logits.data[masked] = math.nan
            data.hidden.data[masked] = math.nan
            terms = fused(data.hidden, data.weight, data, config, chunk_tokens=6)
            grads = torch.autograd.grad(terms.loss_sum, [data.hidden, data.weight])
        from_logits = fused(logits, None, data, config)
        results.append([terms.loss_sum, *grads, *torch.autograd.grad(from_logits.loss_sum, logits)])
    assert (results[1][1][masked] == 0).all()
    for got, wanted in zip(results[1], results[0], strict=True):
        assert torch.equal(got, wanted)


def test_nothing_to_train_on_is_loss_zero_and_gradient_zero() -> None:
    data = case()
    data.loss_mask[:] = False
    terms = fused(data.hidden, data.weight, data, LossConfig())
    assert terms.loss_sum.item() == 0.0
    for grad in torch.autograd.grad(terms.loss_sum, [data.hidden, data.weight]):
        assert (grad == 0).all()


def test_the_gradient_is_scaled_once_and_a_second_backward_raises() -> None:
    data = case()
    logits = data.logits()
    terms = fused(logits, None, data, LossConfig())
    torch.autograd.grad(0.5 * terms.loss_sum, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(terms.loss_sum, logits)


def test_without_gradient_the_logits_are_left_alone() -> None:
    data = case()
    logits = data.logits()
    before = logits.detach().clone()
    with torch.no_grad():
        terms = fused(logits, None, data, LossConfig())
    assert torch.equal(logits, before)
    assert not terms.loss_sum.requires_grad
    fused(logits.detach(), None, data, LossConfig())
    assert torch.equal(logits, before)


def test_a_frozen_weight_gets_no_gradient() -> None:
    data = case()
    terms = fused(data.hidden, data.weight.detach(), data, LossConfig())
    wanted, _, _ = two_steps(data.hidden @ data.weight.t(), data, LossConfig())
    (right,) = torch.autograd.grad(wanted.loss_sum, data.hidden)
    (grad,) = torch.autograd.grad(terms.loss_sum, data.hidden)
    torch.testing.assert_close(grad, right)


def test_the_weight_gradient_goes_to_main_grad_scaled() -> None:
    data = case(torch.float32)
    terms = fused(data.hidden, data.weight, data, LossConfig())
    (wanted,) = torch.autograd.grad(2 * terms.loss_sum, data.weight)
    main_grad = torch.ones(WIDTH, HIDDEN)
    terms = fused(data.hidden, data.weight, data, LossConfig(), main_grad=main_grad)
    assert (main_grad == 1).all()
    (2 * terms.loss_sum).backward()
    torch.testing.assert_close(main_grad - 1, wanted, atol=1e-5, rtol=1e-5)
    assert data.weight.grad is None
    assert data.weight.grad_added_to_main_grad


@pytest.mark.parametrize("scale", [8.0, torch.tensor(0.25)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_known_incoming_scale_fills_main_grad_while_the_logits_are_there(
    dtype: torch.dtype, scale: Tensor | float
) -> None:
    data, config = case(dtype), CONFIGS["everything"]
    main_grad, later = torch.ones(2, WIDTH, HIDDEN).unbind()
    wanted = fused(data.hidden, data.weight, data, config, main_grad=later, chunk_tokens=6)
    (scale * wanted.loss_sum).backward()
    hidden_grad, data.hidden.grad = data.hidden.grad, None
    terms = fused(
        data.hidden,
        data.weight,
        data,
        config,
        main_grad=main_grad,
        incoming_scale=scale,
        chunk_tokens=6,
    )
    assert torch.equal(terms.loss_sum, wanted.loss_sum)
    torch.testing.assert_close(main_grad, later, atol=1e-5, rtol=1e-5)
    formed = main_grad.clone()
    (scale * terms.loss_sum).backward()
    assert torch.equal(main_grad, formed)
    assert torch.equal(data.hidden.grad, hidden_grad)  # a power of two scales without rounding
    assert data.weight.grad is None
    assert data.weight.grad_added_to_main_grad


@pytest.mark.parametrize("from_hidden", [True, False])
def test_a_known_incoming_scale_without_main_grad_gives_the_same_gradients(
    from_hidden: bool,
) -> None:
    data = case()
    results = []
    for scale in (None, 4.0):
        source, weight = (data.hidden, data.weight) if from_hidden else (data.logits(), None)
        terms = fused(source, weight, data, LossConfig(), incoming_scale=scale)
        leaves = [source, weight] if from_hidden else [source]
        results.append(torch.autograd.grad(4.0 * terms.loss_sum, leaves))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_another_gradient_than_incoming_scale_is_refused() -> None:
    data, main_grad = case(torch.float32), torch.zeros(WIDTH, HIDDEN)
    given = {"main_grad": main_grad, "incoming_scale": 2.0}
    terms = fused(data.hidden, data.weight, data, LossConfig(), **given)
    with pytest.raises(RuntimeError, match=r"incoming_scale=2.0, but loss_sum receives 3.0"):
        (3 * terms.loss_sum).backward()
    terms = fused(data.hidden, data.weight, data, LossConfig(), **given)
    (2 * terms.loss_sum).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        (2 * terms.loss_sum).backward()


def test_a_frozen_weight_leaves_main_grad_alone() -> None:
    data, main_grad = case(torch.float32), torch.zeros(WIDTH, HIDDEN)
    weight = data.weight.detach()
    terms = fused(data.hidden, weight, data, LossConfig(), main_grad=main_grad, incoming_scale=1.0)
    terms.loss_sum.backward()
    assert (main_grad == 0).all()
    with torch.no_grad():
        fused(data.hidden, data.weight, data, LossConfig(), main_grad=main_grad, incoming_scale=1.0)
    assert (main_grad == 0).all()


def test_two_runs_are_equal_bit_by_bit() -> None:
    results = []
    for _ in range(2):
        data = case(torch.bfloat16)
        terms = fused(data.hidden, data.weight, data, CONFIGS["everything"], chunk_tokens=6)
        grads = torch.autograd.grad(terms.loss_sum, [data.hidden, data.weight])
        metrics = torch.tensor(list(values(terms).values()))
        results.append([terms.loss_sum, terms.logprobs, terms.entropy, metrics, *grads])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("chunk_tokens", [0, -1])
@pytest.mark.parametrize("from_hidden", [True, False])
def test_a_block_has_at_least_one_row(from_hidden: bool, chunk_tokens: int) -> None:
    data = case()
    source, weight = (data.hidden, data.weight) if from_hidden else (data.logits(), None)
    with pytest.raises(ValueError, match=f"chunk_tokens={chunk_tokens}: need at least 1"):
        fused(source, weight, data, LossConfig(), chunk_tokens=chunk_tokens)


def test_without_weights_a_token_weighs_one() -> None:
    data = case()
    data.token_weights = torch.ones(TOKENS)
    wanted = fused(data.hidden, data.weight, data, LossConfig())
    data.token_weights = None
    assert fused(data.hidden, data.weight, data, LossConfig()).loss_sum == wanted.loss_sum


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": "sequence"}, "loss.ratio=sequence"),
        ({"mismatch": "tis_sequence"}, "loss.mismatch=tis_sequence"),
        ({"mismatch": "sequence_mask"}, "whole responses"),
        ({"mismatch": "geometric"}, "linear_logprobs with policy_loss"),
        ({"aggregation": "sequence_mean"}, "token_weights"),
        ({"kl_coef": 0.1}, "reference_logprobs"),
        ({"mismatch": "icepop"}, "rollout_logprobs"),
    ],
)
def test_what_it_cannot_do_is_refused_with_a_reason(
    settings: dict[str, object], message: str
) -> None:
    data = case()
    for name in data.rest():
        setattr(data, name, None)
    with pytest.raises(ValueError, match=message):
        fused(data.hidden, data.weight, data, LossConfig(**settings))


def test_a_token_that_trains_needs_a_label() -> None:
    data = case()
    data.loss_mask[4] = True  # targets[4] is NO_LABEL
    with pytest.raises(ValueError, match="loss_mask is True at token 4"):
        fused(data.hidden, data.weight, data, LossConfig())


def test_float16_is_refused_unless_its_loss_scale_is_known() -> None:
    data = case(torch.float16)
    with pytest.raises(ValueError, match="float16 without incoming_scale"):
        fused(data.hidden, data.weight, data, LossConfig())
    fused(data.hidden, data.weight, data, LossConfig(), incoming_scale=1024.0)
