from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_dapo.loss import head_blocks
from megatron_dapo.loss.linear_head import linear_logprobs
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs
from megatron_dapo.types import NO_LABEL

TOKENS, HIDDEN, WIDTH, VOCAB = 19, 8, 40, 33


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(WIDTH, HIDDEN, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    targets[[1, TOKENS - 1]] = NO_LABEL
    return hidden, weight, targets


def objective(outputs: tuple[Tensor, Tensor | None]) -> Tensor:
    weights = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1)).double()
    return (torch.stack([x for x in outputs if x is not None]) * weights).sum()


OPTIONS = {"temperature": 0.7, "real_vocab_size": VOCAB}


@pytest.mark.parametrize("chunk_tokens", [1, 7, 19, None])
@pytest.mark.parametrize(
    ("dtype", "value_error", "gradient_error"),
    [(torch.float64, 1e-13, 1e-12), (torch.float32, 5e-6, 2e-6), (torch.bfloat16, 4e-2, 2e-2)],
)
def test_values_and_gradients_are_those_of_full_logits_in_float64(
    dtype: torch.dtype, value_error: float, gradient_error: float, chunk_tokens: int | None
) -> None:
    hidden, weight, targets = case(dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = vocab_parallel_logprobs(exact[0] @ exact[1].t(), targets, **OPTIONS)
    wanted_grads = torch.autograd.grad(objective(wanted), exact)
    got = linear_logprobs(hidden, weight, targets, chunk_tokens=chunk_tokens, **OPTIONS)
    for value, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(value.double(), right, atol=value_error, rtol=0)
    grads = torch.autograd.grad(objective(got), [hidden, weight])
    for grad, right in zip(grads, wanted_grads, strict=True):
        assert grad.dtype == dtype
        bound = gradient_error * right.abs().max().item()
        torch.testing.assert_close(grad.double(), right, atol=bound, rtol=0)


def test_bf16_products_of_the_weight_gradient_are_summed_in_fp32() -> None:
    """Many blocks must round once, not once a block."""
    hidden, weight, targets = case(torch.bfloat16)
    errors = []
    for chunk_tokens in (1, TOKENS):
        outputs = linear_logprobs(hidden, weight, targets, chunk_tokens=chunk_tokens, **OPTIONS)
        (grad,) = torch.autograd.grad(objective(outputs), weight)
        errors.append(grad)
    assert torch.equal(errors[0], errors[1])


def test_weight_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = case(torch.bfloat16)
    grads = []
    for rows in (head_blocks.TILE_ROWS, 16):
        monkeypatch.setattr(head_blocks, "TILE_ROWS", rows)
        loss = objective(linear_logprobs(hidden, weight, targets, **OPTIONS))
        grads.append(torch.autograd.grad(loss, weight)[0])
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen: str) -> None:
    hidden, weight, targets = case(torch.float32)
    wanted = torch.autograd.grad(
        objective(linear_logprobs(hidden, weight, targets)), [hidden, weight]
    )
    tensors = {"hidden": hidden.detach(), "weight": weight.detach()}
    live = "weight" if frozen == "hidden" else "hidden"
    tensors[live].requires_grad_()
    objective(linear_logprobs(tensors["hidden"], tensors["weight"], targets)).backward()
    assert tensors[frozen].grad is None
    assert torch.equal(tensors[live].grad, wanted[0 if live == "hidden" else 1])


def test_the_weight_gradient_goes_to_main_grad_when_that_is_given() -> None:
    hidden, weight, targets = case(torch.bfloat16)
    (wanted,) = torch.autograd.grad(
        objective(linear_logprobs(hidden, weight, targets, **OPTIONS)), weight
    )
    main_grad = torch.ones(WIDTH, HIDDEN)
    outputs = linear_logprobs(hidden, weight, targets, main_grad=main_grad, **OPTIONS)
    objective(outputs).backward()
    assert weight.grad is None
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(main_grad - 1, wanted.float(), atol=2e-2, rtol=1e-2)


def test_a_row_without_label_may_hold_anything() -> None:
    hidden, weight, targets = case(torch.float32)
    with torch.no_grad():
        hidden[targets == NO_LABEL] = math.nan
    logprobs, entropy = linear_logprobs(hidden, weight, targets, chunk_tokens=5, **OPTIONS)
    assert (logprobs[targets == NO_LABEL] == 0).all()
    objective((logprobs, entropy)).backward()
    assert (hidden.grad[targets == NO_LABEL] == 0).all()
    clean_hidden, clean_weight, _ = case(torch.float32)
    clean = linear_logprobs(clean_hidden, clean_weight, targets, chunk_tokens=5, **OPTIONS)
    wanted = torch.autograd.grad(objective(clean), [clean_hidden, clean_weight])
    assert torch.equal(hidden.grad, wanted[0])
    assert torch.equal(weight.grad, wanted[1])


def test_no_token_is_no_work() -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.zeros(6, 4, requires_grad=True)
    logprobs, entropy = linear_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(6, 3)}, r"weight \(6, 3\)"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"need \(2,\)"),
        ({"main_grad": torch.zeros(6, 4).double()}, "main_grad is torch.float64"),
        ({"targets": torch.tensor([0, 6])}, "targets holds 6"),
        ({"targets": torch.tensor([0, 1], dtype=torch.int16)}, "targets are torch.int16"),
        ({"hidden": torch.zeros(2, 4).bfloat16()}, "torch.bfloat16 and weight is torch.float32"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"chunk_tokens": -3}, "chunk_tokens=-3"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Tensor | int], message: str) -> None:
    arguments = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(6, 4),
        "targets": torch.tensor([0, 1]),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**arguments)
