"""The loss on a CUDA device against float64 on CPU: fused accumulation, block sizes, masking."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.linear_head import linear_logprobs
from megatron_dapo.loss.policy_cross_entropy import policy_cross_entropy
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs
from megatron_dapo.types import NO_LABEL

TOKENS, HIDDEN, WIDTH, VOCAB = 300, 64, 1024, 1000
VIEW = {"temperature": 0.7, "real_vocab_size": VOCAB}


@pytest.fixture
def case() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    targets[::7] = NO_LABEL
    hidden = torch.randn(TOKENS, HIDDEN, generator=g)
    weight = torch.randn(WIDTH, HIDDEN, generator=g) / 4
    logprobs, _ = vocab_parallel_logprobs(hidden @ weight.t(), targets, **VIEW)
    return {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        "old_logprobs": logprobs + 0.05 * torch.randn(TOKENS, generator=g),
        "advantages": torch.randn(TOKENS, generator=g),
        "loss_mask": targets != NO_LABEL,
    }


def assert_near(got: Tensor, wanted: Tensor, error: float) -> None:
    bound = error * wanted.abs().max().item()
    torch.testing.assert_close(got.cpu().double(), wanted, atol=bound, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [64, None])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_head_and_gradients_match_float64(
    case: dict[str, Tensor], dtype: torch.dtype, error: float, chunk_tokens: int | None
) -> None:
    exact = [case[name].to(dtype).double().requires_grad_() for name in ("hidden", "weight")]
    wanted = vocab_parallel_logprobs(exact[0] @ exact[1].t(), case["targets"], **VIEW)
    grads = torch.autograd.grad(wanted[0].sum() + 0.1 * wanted[1].sum(), exact)
    leaves = [case[name].to("cuda", dtype).requires_grad_() for name in ("hidden", "weight")]
    main_grad = torch.zeros(WIDTH, HIDDEN, device="cuda")
    got = linear_logprobs(
        *leaves, case["targets"].cuda(), chunk_tokens=chunk_tokens, main_grad=main_grad, **VIEW
    )
    (got[0].sum() + 0.1 * got[1].sum()).backward()
    for value, right in zip(got, wanted, strict=True):
        assert_near(value.detach(), right.detach(), error)
    assert_near(leaves[0].grad, grads[0], error)
    assert_near(main_grad, grads[1], error)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_fused_loss_matches_float64(
    case: dict[str, Tensor], dtype: torch.dtype, error: float
) -> None:
    config = LossConfig(clip_low=0.9, clip_high=5.0, entropy_coef=0.01)
    rest = {name: tensor for name, tensor in case.items() if name not in ("hidden", "weight")}
    exact = [case[name].to(dtype).double().requires_grad_() for name in ("hidden", "weight")]
    wanted = policy_cross_entropy(*exact, **rest, config=config, **VIEW)
    grads = torch.autograd.grad(2 * wanted.loss_sum, exact)
    moved = {name: tensor.cuda() for name, tensor in rest.items()}
    leaves = [case[name].to("cuda", dtype).requires_grad_() for name in ("hidden", "weight")]
    got = policy_cross_entropy(*leaves, **moved, config=config, chunk_tokens=64, **VIEW)
    (2 * got.loss_sum).backward()
    assert got.loss_sum.item() == pytest.approx(wanted.loss_sum.item(), rel=10 * error, abs=error)
    for leaf, right in zip(leaves, grads, strict=True):
        assert_near(leaf.grad, right, error)


def test_rows_without_label_may_hold_nan(case: dict[str, Tensor]) -> None:
    logits = (case["hidden"] @ case["weight"].t()).cuda()
    logits[case["targets"].cuda() == NO_LABEL] = torch.nan
    leaf = logits.requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(leaf, case["targets"].cuda(), **VIEW)
    (grad,) = torch.autograd.grad(logprobs.sum(), leaf)
    assert grad.isfinite().all()


def test_a_label_out_of_range_is_nan_and_not_a_silent_number() -> None:
    logprobs, _ = vocab_parallel_logprobs(
        torch.zeros(2, 8, device="cuda"), torch.tensor([3, 8], device="cuda")
    )
    assert logprobs[0].isfinite()
    assert logprobs[1].isnan()
