from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs
from megatron_dapo.types import NO_LABEL


def reference(logits: Tensor, targets: Tensor, temperature: float, vocab: int) -> list[Tensor]:
    """Log-prob and entropy by log_softmax in float64; rows without a label give 0."""
    keep = targets != NO_LABEL
    rows = torch.where(keep[:, None], logits.double()[:, :vocab], 0.0)
    table = (rows / temperature).log_softmax(-1)
    logprobs = table.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    entropy = -torch.where(table == -math.inf, 0.0, table.exp() * table).sum(-1)
    return [torch.where(keep, values, 0.0) for values in (logprobs, entropy)]


def case(dtype: torch.dtype, *, tokens: int = 23, width: int = 40, vocab: int = 40) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    logits = (torch.randn(tokens, width, generator=g) * 3).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), generator=g)
    targets[[2, tokens - 1]] = NO_LABEL
    return [logits, targets]


@pytest.mark.parametrize("chunk_tokens", [1, 7, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("vocab", [40, 33])
@pytest.mark.parametrize(
    ("dtype", "value_error", "gradient_error"),
    [
        (torch.float64, 1e-13, 1e-13),
        (torch.float32, 5e-6, 1e-6),
        (torch.bfloat16, 5e-6, 4e-3),  # the gradient's own rounding to bf16
    ],
)
def test_values_and_gradients_are_those_of_log_softmax(
    dtype: torch.dtype,
    value_error: float,
    gradient_error: float,
    vocab: int,
    temperature: float,
    chunk_tokens: int | None,
) -> None:
    logits, targets = case(dtype, vocab=vocab)
    exact = logits.double().requires_grad_()
    wanted = reference(exact, targets, temperature, vocab)
    weights = torch.randn(2, targets.numel(), generator=torch.Generator().manual_seed(1)).double()
    (wanted_grad,) = torch.autograd.grad((torch.stack(wanted) * weights).sum(), exact)
    leaf = logits.clone().requires_grad_()
    got = vocab_parallel_logprobs(
        leaf, targets, temperature=temperature, real_vocab_size=vocab, chunk_tokens=chunk_tokens
    )
    for value, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(value.double(), right, atol=value_error, rtol=0)
    (grad,) = torch.autograd.grad((torch.stack(got) * weights).sum(), leaf)
    assert grad.dtype == dtype
    bound = gradient_error * wanted_grad.abs().max().item()
    torch.testing.assert_close(grad.double(), wanted_grad, atol=bound, rtol=0)
    assert (grad[:, vocab:] == 0).all()


def test_autograd_agrees_with_finite_differences() -> None:
    logits, targets = case(torch.float64, tokens=4, width=6, vocab=5)

    def function(x: Tensor) -> list[Tensor]:
        return vocab_parallel_logprobs(
            x, targets, temperature=0.7, real_vocab_size=5, inplace_backward=False
        )

    assert torch.autograd.gradcheck(function, [logits.requires_grad_()])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_a_row_without_label_may_hold_anything(garbage: float) -> None:
    logits, targets = case(torch.float32)
    logits[targets == NO_LABEL] = garbage
    leaf = logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(leaf, targets, chunk_tokens=5)
    assert entropy is not None
    (grad,) = torch.autograd.grad((2 * logprobs + entropy).sum(), leaf)
    empty = targets == NO_LABEL
    for values in (logprobs, entropy, grad):
        assert (values[empty] == 0).all()
        assert values.isfinite().all()


def test_a_nan_gradient_of_a_row_without_label_does_not_spread() -> None:
    logits, targets = case(torch.float32)
    leaf = logits.requires_grad_()
    outputs = vocab_parallel_logprobs(leaf, targets)
    incoming = torch.where(targets == NO_LABEL, math.nan, 1.0)
    (grad,) = torch.autograd.grad(outputs, leaf, (incoming, incoming))
    assert grad.isfinite().all()


def test_nan_logits_of_a_row_that_does_not_train_leave_no_gradient() -> None:
    logits, targets = case(torch.float32)
    logits[5] = math.nan
    leaf = logits.requires_grad_()
    outputs = vocab_parallel_logprobs(leaf, targets)
    incoming = torch.ones_like(outputs[0])
    incoming[5] = 0.0
    (grad,) = torch.autograd.grad(outputs, leaf, (incoming, incoming))
    assert (grad[5] == 0).all()
    assert grad.isfinite().all()


def test_a_forbidden_token_has_probability_zero_and_no_gradient() -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.0]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([0]))
    wanted = torch.tensor([1.0, 0.0]).log_softmax(0)
    assert logprobs.item() == pytest.approx(wanted[0].item())
    assert entropy.item() == pytest.approx(-(wanted.exp() * wanted).sum().item())
    (grad,) = torch.autograd.grad(logprobs + entropy, logits)
    assert grad[0, 1] == 0
    assert grad.isfinite().all()


def test_a_large_offset_of_the_logits_costs_no_accuracy() -> None:
    logits, targets = case(torch.float32)
    rounded = logits + 3000.0
    for temperature in (1.0, 0.7):
        got = vocab_parallel_logprobs(rounded, targets, temperature=temperature)
        for value, right in zip(got, reference(rounded, targets, temperature, 40), strict=True):
            torch.testing.assert_close(value.double(), right, atol=5e-6, rtol=0)


WILD_ROWS = [
    [1e10, 5e9, 0.0],
    [1e10, 1e10, -1e10],
    [-1e30, -1e30, -1e30],
    [1e37, -1e37, 0.0],
    [-7e12, -7.1e12, -3e38],
    [1.0, 2.0, 3.0],
]


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("label", [0, 1])
def test_logits_of_any_size_have_log_probs(
    label: int, temperature: float, with_entropy: bool
) -> None:
    logits = torch.tensor(WILD_ROWS).requires_grad_()
    targets = torch.full((len(WILD_ROWS),), label)
    exact = logits.detach().double().requires_grad_()
    scores = (exact / temperature).log_softmax(-1)
    wanted = scores[:, label].clamp(min=torch.finfo(torch.float32).min)
    logprobs, entropy = vocab_parallel_logprobs(
        logits,
        targets,
        temperature=temperature,
        with_entropy=with_entropy,
        inplace_backward=False,
    )
    torch.testing.assert_close(logprobs.double(), wanted, atol=2e-6, rtol=2e-6)
    if entropy is not None:
        wanted_entropy = -(scores.exp() * scores.nan_to_num()).sum(-1)
        torch.testing.assert_close(entropy.double(), wanted_entropy, atol=2e-6, rtol=2e-6)
    (grad,) = torch.autograd.grad(logprobs.sum(), logits)
    (right,) = torch.autograd.grad(scores[:, label].sum(), exact)
    torch.testing.assert_close(grad.double(), right, atol=2e-6, rtol=2e-6)


VOCABULARY = 151_936


@pytest.mark.parametrize("scale", [0.02, 2.5, 12.0])
def test_the_accuracy_that_is_promised_holds_for_a_real_vocabulary(scale: float) -> None:
    """From bf16 logits, flat to peaked, against float64 of the same logits."""
    g = torch.Generator().manual_seed(4)
    logits = (scale * torch.randn(6, VOCABULARY, generator=g)).bfloat16()
    targets = torch.randint(0, VOCABULARY, (6,), generator=g)
    targets[:2] = logits[:2].argmax(-1)
    scores = logits.double().log_softmax(-1)
    wanted = scores.gather(1, targets[:, None])[:, 0]
    logprobs, entropy = vocab_parallel_logprobs(logits, targets)
    ulp = torch.finfo(torch.float32).eps * torch.exp2(wanted.abs().log2().floor())
    assert ((logprobs - wanted).abs() <= (2 * ulp).clamp(min=5e-6)).all()
    assert (entropy + (scores.exp() * scores).sum(-1)).abs().max() <= 1e-5


def test_the_gradient_lies_in_the_buffer_of_the_logits_and_a_second_backward_raises() -> None:
    logits, targets = case(torch.bfloat16)
    leaf = logits.requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(leaf, targets)
    (grad,) = torch.autograd.grad(logprobs.sum(), leaf, retain_graph=True)
    assert grad.data_ptr() == leaf.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_the_logits_survive_when_asked_for() -> None:
    logits, targets = case(torch.float32)
    leaf = logits.clone().requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(leaf, targets, inplace_backward=False)
    logprobs.sum().backward()
    assert torch.equal(leaf, logits)


def test_expanded_logits_are_never_overwritten() -> None:
    row = torch.randn(1, 8)
    leaf = row.expand(4, 8).requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(leaf, torch.tensor([0, 1, 2, 3]))
    (grad,) = torch.autograd.grad(logprobs.sum(), leaf)
    wanted = torch.eye(8)[:4] - row.softmax(-1)
    torch.testing.assert_close(grad, wanted)


def test_entropy_can_be_left_out() -> None:
    logits, targets = case(torch.float32)
    with_entropy, _ = vocab_parallel_logprobs(logits, targets)
    without, entropy = vocab_parallel_logprobs(logits, targets, with_entropy=False)
    assert entropy is None
    assert torch.equal(without, with_entropy)


def test_no_token_is_no_work() -> None:
    leaf = torch.zeros(0, 8, requires_grad=True)
    logprobs, _ = vocab_parallel_logprobs(leaf, torch.zeros(0, dtype=torch.int64))
    logprobs.sum().backward()
    assert logprobs.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([40, 0])}, "targets holds 40"),
        ({"targets": torch.tensor([-1, 0])}, "targets holds -1"),
        ({"targets": torch.tensor([1, 0], dtype=torch.int32)}, "targets are torch.int32"),
        ({"logits": torch.zeros(2, 40, dtype=torch.int64)}, "logits are torch.int64"),
        ({"targets": torch.tensor([0])}, r"\(2, 40\)"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"real_vocab_size": 41}, "real_vocab_size=41"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"logits": torch.zeros(2, 40), "targets": torch.tensor([0, 1]), **change}
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprobs(**arguments)
