"""What the tests of the loss on a CUDA device share: inputs of full size, float64 by chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.policy_loss import policy_loss
from megatron_dapo.types import NO_LABEL

TOKENS, HIDDEN, WIDTH, VOCAB = 8192, 256, 151936, 151665
"""Qwen2.5's head: its tokens, padded to a multiple of 256."""
CHUNK = 256
"""Rows whose float64 logits exist at a time."""
CONFIG = LossConfig(clip_low=0.9, clip_high=5.0, entropy_coef=0.01)


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def random_logits(dtype: torch.dtype, tokens: int = TOKENS, width: int = WIDTH) -> Tensor:
    """[tokens, width], padding NaN."""
    logits = torch.empty(tokens, width, device="cuda", dtype=dtype)
    logits.normal_(0.0, 2.5, generator=generator(0))
    logits[:, VOCAB:] = torch.nan
    return logits


def random_head(dtype: torch.dtype, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """hidden [tokens, HIDDEN] and weight [WIDTH, HIDDEN], whose logits have deviation 2.5."""
    hidden = torch.randn(tokens, HIDDEN, device="cuda", generator=generator(1))
    weight = torch.randn(WIDTH, HIDDEN, device="cuda", generator=generator(2))
    return hidden.to(dtype), (2.5 / HIDDEN**0.5 * weight).to(dtype)


def token_inputs(tokens: int = TOKENS) -> dict[str, Tensor]:
    """targets, old_logprobs, advantages, loss_mask, each [tokens]."""
    g = generator(3)
    targets = torch.randint(0, VOCAB, (tokens,), device="cuda", generator=g)
    targets[::7] = NO_LABEL
    return {
        "targets": targets,
        "old_logprobs": -15.0 + torch.randn(tokens, device="cuda", generator=g),
        "advantages": torch.randn(tokens, device="cuda", generator=g),
        "loss_mask": targets != NO_LABEL,
    }


def chunks(tokens: int) -> Iterator[slice]:
    for start in range(0, tokens, CHUNK):
        yield slice(start, min(start + CHUNK, tokens))


def exact_rows(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of float64 [rows, WIDTH] logits, by log_softmax."""
    keep = targets != NO_LABEL
    table = (logits[:, :VOCAB] / temperature).log_softmax(-1)
    logprobs = table.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    entropy = -(table.exp() * table).sum(-1)
    return torch.where(keep, logprobs, 0.0), torch.where(keep, entropy, 0.0)


def exact_loss(outputs: tuple[Tensor, Tensor], given: dict[str, Tensor], rows: slice) -> Tensor:
    """CONFIG's loss sum of some rows, from their float64 log-probs and entropies."""
    terms = policy_loss(
        outputs[0],
        given["old_logprobs"][rows].double(),
        given["advantages"][rows].double(),
        given["loss_mask"][rows],
        torch.zeros_like(given["targets"][rows]),
        num_sequences=1,
        config=CONFIG,
        entropy=outputs[1],
    )
    return terms.loss_sum


def ulp(values: Tensor) -> Tensor:
    """Distance to the next fp32 number."""
    return 2.0 ** (torch.frexp(values.abs()).exponent.double() - 24)


def assert_outputs(got: tuple[Tensor, Tensor | None], wanted: tuple[Tensor, Tensor]) -> None:
    """Log-probs to 5e-6 or 2 ulp, entropies to 1e-5."""
    assert got[1] is not None
    wanted_logprobs, wanted_entropy = (value.detach() for value in wanted)
    error = (got[0].detach().double() - wanted_logprobs).abs()
    assert (error <= (2 * ulp(wanted_logprobs)).clamp(min=5e-6)).all(), error.max()
    error = (got[1].detach().double() - wanted_entropy).abs()
    assert (error <= 1e-5).all(), error.max()


def assert_gradient_rows(got: Tensor, wanted: Tensor) -> None:
    """d loss / d logits of rows: its own rounding, and 2e-6 of the row's largest."""
    relative = 2.0**-8 if got.dtype == torch.bfloat16 else 2e-6
    floor = 2e-6 * wanted.abs().amax(1, keepdim=True)
    error = (got.double() - wanted).abs()
    assert (error <= relative * wanted.abs() + floor).all(), error.max()
    assert (got[:, VOCAB:] == 0).all()
