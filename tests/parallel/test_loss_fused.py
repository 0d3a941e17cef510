"""The head and the fused loss on two vocabulary shards equal one; with and without SP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.linear_head import linear_logprobs
from megatron_dapo.loss.policy_cross_entropy import policy_cross_entropy
from megatron_dapo.observability.metrics import MetricBag
from megatron_dapo.types import NO_LABEL
from tests.collectives import Call, recorded_collectives
from tests.ranks import run_ranks

TOKENS, HIDDEN, WIDTH = 18, 8, 48
CONFIG = LossConfig(dual_clip=1.5, kl_coef=0.1, entropy_coef=0.05, mismatch="tis_token")


def _case(vocab: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2)
    targets = torch.randint(0, vocab, (TOKENS,), generator=g)
    targets[4] = NO_LABEL
    hidden = torch.randn(TOKENS, HIDDEN, generator=g)
    weight = torch.randn(WIDTH, HIDDEN, generator=g)
    logprobs, _ = linear_logprobs(hidden, weight, targets, temperature=0.7, real_vocab_size=vocab)
    old = logprobs + 0.3 * torch.randn(TOKENS, generator=g)
    return {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        "old_logprobs": old,
        "advantages": torch.randn(TOKENS, generator=g),
        "loss_mask": (torch.rand(TOKENS, generator=g) < 0.8) & (targets != NO_LABEL),
        "rollout_logprobs": old + 0.2 * torch.randn(TOKENS, generator=g),
        "reference_logprobs": old + 0.2 * torch.randn(TOKENS, generator=g),
    }


def _close(got: Tensor, wanted: Tensor, name: str) -> None:
    torch.testing.assert_close(
        got, wanted, atol=1e-5, rtol=1e-5, msg=lambda text: f"{name}: {text}"
    )


def _shares(case: dict[str, Tensor], rank: int, world: int, scattered: bool) -> list[Tensor]:
    hidden = case["hidden"].chunk(world)[rank] if scattered else case["hidden"]
    weight = case["weight"].chunk(world)[rank]
    return [x.clone().requires_grad_() for x in (hidden, weight)]


def _mine(grads: list[Tensor], rank: int, world: int, scattered: bool) -> list[Tensor]:
    hidden = grads[0].chunk(world)[rank] if scattered else grads[0]
    return [hidden, grads[1].chunk(world)[rank]]


def _calls(calls: list[Call]) -> list[tuple[str, tuple[int, ...]]]:
    return [(call.name, call.shape) for call in calls]


def _gather(scattered: bool) -> list[tuple[str, tuple[int, ...]]]:
    """What brings every rank all hidden states."""
    return [("all_gather_into_tensor", (TOKENS // 2, HIDDEN))] if scattered else []


def _sum(scattered: bool) -> list[tuple[str, tuple[int, ...]]]:
    """What adds up the ranks' gradients of the hidden states."""
    if scattered:
        return [("reduce_scatter_tensor", (TOKENS // 2, HIDDEN))]
    return [("all_reduce", (TOKENS, HIDDEN))]


def check_linear_logprobs(rank: int, world: int, vocab: int, scattered: bool) -> None:
    case = _case(vocab)
    whole = [case[name].clone().requires_grad_() for name in ("hidden", "weight")]
    view = {"temperature": 0.7, "real_vocab_size": vocab, "chunk_tokens": 5}
    wanted = linear_logprobs(*whole, case["targets"], **view)
    wanted_grads = torch.autograd.grad(2 * wanted[0].sum() + wanted[1].sum(), whole)
    leaves = _shares(case, rank, world, scattered)
    with recorded_collectives() as forward:
        got = linear_logprobs(
            *leaves, case["targets"], tp_group=dist.group.WORLD, sequence_parallel=scattered, **view
        )
    for value, right in zip(got, wanted, strict=True):
        _close(value, right, "values")
    with recorded_collectives() as backward:
        grads = torch.autograd.grad(2 * got[0].sum() + got[1].sum(), leaves)
    assert _calls(forward) == [*_gather(scattered), ("all_gather", (4, TOKENS))]
    assert _calls(backward) == [*_gather(scattered), *_sum(scattered)]
    for grad, right in zip(grads, _mine(wanted_grads, rank, world, scattered), strict=True):
        _close(grad, right, "gradient")


def check_fused_from_hidden(rank: int, world: int, vocab: int, scattered: bool) -> None:
    case = _case(vocab)
    rest = {k: v for k, v in case.items() if k not in ("hidden", "weight")}
    view = {"temperature": 0.7, "real_vocab_size": vocab, "chunk_tokens": 5, "config": CONFIG}
    whole = [case[name].clone().requires_grad_() for name in ("hidden", "weight")]
    wanted = policy_cross_entropy(*whole, **rest, **view)
    wanted_grads = torch.autograd.grad(2 * wanted.loss_sum, whole)
    leaves = _shares(case, rank, world, scattered)
    with recorded_collectives() as forward:
        got = policy_cross_entropy(
            *leaves, **rest, **view, tp_group=dist.group.WORLD, sequence_parallel=scattered
        )
    _close(got.loss_sum, wanted.loss_sum, "loss")
    _close(got.logprobs, wanted.logprobs, "logprobs")
    _close(got.entropy, wanted.entropy, "entropy")
    bags = [MetricBag(dict(terms.metrics)).values() for terms in (got, wanted)]
    _close(torch.tensor(list(bags[0].values())), torch.tensor(list(bags[1].values())), "metrics")
    with recorded_collectives() as backward:
        grads = torch.autograd.grad(2 * got.loss_sum, leaves)
    blocks = [("all_gather", (4, rows)) for rows in (5, 5, 5, 3)]
    assert _calls(forward) == [*_gather(scattered), *blocks, *_sum(scattered)]
    assert not backward
    for grad, right in zip(grads, _mine(wanted_grads, rank, world, scattered), strict=True):
        _close(grad, right, "gradient")


def check_fused_from_logits(rank: int, world: int, vocab: int) -> None:
    case = _case(vocab)
    logits = case.pop("hidden") @ case.pop("weight").t()
    view = {"temperature": 0.7, "real_vocab_size": vocab, "config": CONFIG}
    whole = logits.clone().requires_grad_()
    wanted = policy_cross_entropy(whole, None, **case, **view)
    (wanted_grad,) = torch.autograd.grad(wanted.loss_sum, whole)
    leaf = logits.chunk(world, dim=1)[rank].clone().requires_grad_()
    with recorded_collectives() as calls:
        got = policy_cross_entropy(
            leaf, None, **case, **view, tp_group=dist.group.WORLD, chunk_tokens=9
        )
        (grad,) = torch.autograd.grad(got.loss_sum, leaf)
    _close(got.loss_sum, wanted.loss_sum, "loss")
    assert _calls(calls) == [("all_gather", (4, 9))] * 2
    _close(grad, wanted_grad.chunk(world, dim=1)[rank], "gradient")


def check_bf16_gradients_survive_the_sum_over_ranks(rank: int, world: int) -> None:
    case = _case(WIDTH)
    exact = [case[name].clone().requires_grad_() for name in ("hidden", "weight")]
    logprobs, _ = linear_logprobs(*exact, case["targets"])
    (wanted,) = torch.autograd.grad(logprobs.sum(), exact[0])
    for scattered in (False, True):
        shares = _shares(case, rank, world, scattered)
        leaves = [x.detach().bfloat16().requires_grad_() for x in shares]
        logprobs, _ = linear_logprobs(
            *leaves, case["targets"], tp_group=dist.group.WORLD, sequence_parallel=scattered
        )
        (grad,) = torch.autograd.grad(logprobs.sum(), leaves[0])
        right = wanted.chunk(world)[rank] if scattered else wanted
        error = (grad.float() - right).abs().max() / right.abs().max()
        assert grad.dtype == torch.bfloat16
        assert error < 2e-2, error


def _all_checks(rank: int, world: int) -> None:
    for vocab in (48, 40, 20):  # no padding; padding in the last shard; nothing else in it
        for scattered in (False, True):
            check_linear_logprobs(rank, world, vocab, scattered)
            check_fused_from_hidden(rank, world, vocab, scattered)
        check_fused_from_logits(rank, world, vocab)
    check_bf16_gradients_survive_the_sum_over_ranks(rank, world)


def test_two_ranks_compute_the_head_and_loss_of_one() -> None:
    run_ranks(2, _all_checks)
