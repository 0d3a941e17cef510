"""The loss on a CUDA device at full size against float64: values, gradients, every source."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo import device
from megatron_dapo.loss import shards
from megatron_dapo.loss.linear_head import linear_logprobs
from megatron_dapo.loss.policy_cross_entropy import policy_cross_entropy
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs
from megatron_dapo.types import NO_LABEL
from tests.gpu.loss_cases import (
    CONFIG,
    HIDDEN,
    TOKENS,
    VOCAB,
    WIDTH,
    assert_gradient_rows,
    assert_outputs,
    chunks,
    exact_loss,
    exact_rows,
    random_head,
    random_logits,
    token_inputs,
)
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16]
HEAD_BARS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""Error of the gradients of hidden states and weight over their largest: sums of gradients of
logits, which are rounded to bf16 there."""
TP_TOKENS = 1024


@pytest.fixture(params=["triton", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to visit rows on a device."""
    if request.param == "torch":
        monkeypatch.setattr(shards, "device_kernels", lambda *rows: None)
    elif not device.has_triton():
        pytest.skip("needs triton")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_entropy_and_their_gradient(dtype: torch.dtype, temperature: float) -> None:
    logits, targets = random_logits(dtype), token_inputs()["targets"]
    leaf = logits.clone().requires_grad_()
    got = vocab_parallel_logprobs(leaf, targets, temperature=temperature, real_vocab_size=VOCAB)
    (grad,) = torch.autograd.grad(got[0].sum() + 0.1 * got[1].sum(), leaf)
    assert grad.data_ptr() == leaf.data_ptr()
    for rows in chunks(TOKENS):
        exact = logits[rows].double().requires_grad_()
        wanted = exact_rows(exact, targets[rows], temperature)
        assert_outputs((got[0][rows], got[1][rows]), wanted)
        (right,) = torch.autograd.grad(wanted[0].sum() + 0.1 * wanted[1].sum(), exact)
        assert_gradient_rows(grad[rows], right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_loss_from_logits(dtype: torch.dtype) -> None:
    logits, given = random_logits(dtype), token_inputs()
    leaf = logits.clone().requires_grad_()
    got = policy_cross_entropy(leaf, None, **given, config=CONFIG, real_vocab_size=VOCAB)
    (grad,) = torch.autograd.grad(got.loss_sum, leaf)
    loss_sum = 0.0
    for rows in chunks(TOKENS):
        exact = logits[rows].double().requires_grad_()
        wanted = exact_rows(exact, given["targets"][rows], 1.0)
        assert_outputs((got.logprobs[rows], got.entropy[rows]), wanted)
        loss = exact_loss(wanted, given, rows)
        loss_sum += loss.item()
        (right,) = torch.autograd.grad(loss, exact)
        trains = given["loss_mask"][rows]
        # the ratio makes a relative error of the log-prob's absolute one
        error = (grad[rows].double() - right).abs()
        bound = 2.0**-7 if dtype == torch.bfloat16 else 2e-5
        assert (error <= bound * right.abs() + 2e-6 * right.abs().amax(1, keepdim=True)).all()
        assert (grad[rows][~trains] == 0).all()
    assert got.loss_sum.item() == pytest.approx(loss_sum, rel=1e-5, abs=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_loss_from_hidden_states_into_main_grad(dtype: torch.dtype) -> None:
    head, given = random_head(dtype), token_inputs()
    leaves = [tensor.clone().requires_grad_() for tensor in head]
    main_grad = torch.ones(WIDTH, HIDDEN, device="cuda")
    got = policy_cross_entropy(
        *leaves,
        **given,
        config=CONFIG,
        real_vocab_size=VOCAB,
        main_grad=main_grad,
        incoming_scale=2.0,
    )
    (2.0 * got.loss_sum).backward()
    hidden_grad, weight_grad = exact_head_gradients(head, given, (got.logprobs, got.entropy))
    assert leaves[1].grad is None
    for mine, right in ((leaves[0].grad, hidden_grad), (main_grad - 1.0, weight_grad)):
        error = (mine.double() - 2.0 * right).abs().max()
        assert error <= HEAD_BARS[dtype] * (2.0 * right).abs().max() + 1e-6


def exact_head_gradients(
    head: tuple[Tensor, Tensor], given: dict[str, Tensor], outputs: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Float64 gradients of CONFIG's loss; on the way `outputs` are compared.

    The product of bf16 factors has fp32 sums, whose error the logits of both dtypes share.
    """
    weight = head[1].double()
    hidden_grad = torch.empty(head[0].shape, dtype=torch.float64, device="cuda")
    weight_grad = torch.zeros_like(weight)
    for rows in chunks(head[0].shape[0]):
        hidden = head[0][rows].double()
        logits = (hidden @ weight.t()).requires_grad_()
        wanted = exact_rows(logits, given["targets"][rows], 1.0)
        for mine, right in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(mine[rows].double(), right.detach(), atol=2e-5, rtol=0)
        (grad,) = torch.autograd.grad(exact_loss(wanted, given, rows), logits)
        hidden_grad[rows] = grad @ weight
        weight_grad.addmm_(grad.t(), hidden)
    return hidden_grad, weight_grad


@pytest.mark.parametrize("chunk_tokens", [64, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_step_loss_from_hidden_states(dtype: torch.dtype, chunk_tokens: int | None) -> None:
    tokens = 300
    head, targets = random_head(dtype, tokens), token_inputs(tokens)["targets"]
    leaves = [tensor.clone().requires_grad_() for tensor in head]
    got = linear_logprobs(*leaves, targets, real_vocab_size=VOCAB, chunk_tokens=chunk_tokens)
    (got[0].sum() + 0.1 * got[1].sum()).backward()
    exact = [tensor.double().requires_grad_() for tensor in head]
    wanted = exact_rows(exact[0] @ exact[1].t(), targets, 1.0)
    (wanted[0].sum() + 0.1 * wanted[1].sum()).backward()
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, atol=2e-5, rtol=0)
    for leaf, reference in zip(leaves, exact, strict=True):
        error = (leaf.grad.double() - reference.grad).abs().max()
        assert error <= HEAD_BARS[dtype] * reference.grad.abs().max()


@pytest.mark.parametrize("source", ["logits", "hidden"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_agree_bit_by_bit(dtype: torch.dtype, source: str) -> None:
    given, runs = token_inputs(), []
    for _ in range(2):
        tensors = [random_logits(dtype)] if source == "logits" else [*random_head(dtype)]
        leaves = [tensor.requires_grad_() for tensor in tensors]
        inputs = (leaves[0], None) if source == "logits" else leaves
        got = policy_cross_entropy(*inputs, **given, config=CONFIG, real_vocab_size=VOCAB)
        grads = torch.autograd.grad(got.loss_sum, leaves)
        runs.append([got.loss_sum.detach(), got.logprobs, got.entropy, *grads])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.usefixtures("kernels")
def test_rows_without_label_may_hold_nan() -> None:
    logits, targets = random_logits(torch.float32, 64), token_inputs(64)["targets"]
    logits[targets == NO_LABEL] = torch.nan
    leaf = logits.requires_grad_()
    outputs = vocab_parallel_logprobs(leaf, targets, real_vocab_size=VOCAB)
    (grad,) = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), leaf)
    assert all(values.isfinite().all() for values in (*outputs, grad))
    assert (grad[targets == NO_LABEL] == 0).all()


@pytest.mark.usefixtures("kernels")
def test_nan_with_a_label_is_seen_and_stays_in_its_row() -> None:
    logits, targets = random_logits(torch.bfloat16, 64), token_inputs(64)["targets"]
    logits[1, 70000] = torch.nan
    outputs = vocab_parallel_logprobs(logits, targets, real_vocab_size=VOCAB)
    for values in outputs:
        assert values[1].isnan()
        assert values.isnan().sum() == 1


@pytest.mark.usefixtures("kernels")
def test_a_label_out_of_range_is_nan_and_not_a_silent_number() -> None:
    logprobs, _ = vocab_parallel_logprobs(
        torch.zeros(2, 8, device="cuda"), torch.tensor([3, 8], device="cuda")
    )
    assert logprobs[0].isfinite()
    assert logprobs[1].isnan()


def check_two_devices_equal_one(rank: int, world: int) -> None:
    given = token_inputs(TP_TOKENS)
    width = WIDTH // world
    for dtype in DTYPES:
        logits, (hidden, weight) = random_logits(dtype, TP_TOKENS), random_head(dtype, TP_TOKENS)
        shares = [
            (logits, None),
            (logits[:, rank * width : (rank + 1) * width], None),
            (hidden, weight),
            (hidden, weight[rank * width : (rank + 1) * width]),
        ]
        runs = []
        for number, share in enumerate(shares):
            leaves = [each.clone().requires_grad_() if each is not None else None for each in share]
            group = dist.group.WORLD if number % 2 else None
            got = policy_cross_entropy(
                *leaves, **given, config=CONFIG, real_vocab_size=VOCAB, tp_group=group
            )
            got.loss_sum.backward()
            runs.append((got, [leaf.grad.double() for leaf in leaves if leaf is not None]))
        mine = slice(rank * width, (rank + 1) * width)
        for (one, whole), (two, share) in ((runs[0], runs[1]), (runs[2], runs[3])):
            torch.testing.assert_close(two.logprobs, one.logprobs, atol=1e-5, rtol=0)
            torch.testing.assert_close(two.entropy, one.entropy, atol=1e-5, rtol=0)
            parts = [whole[0], whole[1][mine]] if len(whole) == 2 else [whole[0][:, mine]]
            for got_part, part in zip(share, parts, strict=True):
                error = (got_part - part).abs().max()
                # bf16: the parts of the hidden states' gradient are rounded, too
                assert error <= 2 * HEAD_BARS[dtype] * part.abs().max()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_equal_one() -> None:
    run_ranks(2, check_two_devices_equal_one, backend="nccl")
