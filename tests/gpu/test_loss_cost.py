"""What the loss moves and holds on a CUDA device: bytes a logit, peak memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_dapo import device
from megatron_dapo.loss.head_blocks import GPU_ROWS
from megatron_dapo.loss.policy_cross_entropy import policy_cross_entropy
from megatron_dapo.loss.shards import RowVisitor, VocabShard
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs
from tests.gpu.loss_cases import (
    CONFIG,
    HIDDEN,
    VOCAB,
    WIDTH,
    random_head,
    random_logits,
    token_inputs,
)

DTYPES = [torch.float32, torch.bfloat16]
RUNS = 10
MOST_MOVES = 4
"""Statistics and gradient read, read and write each logit once; 4 times 2 bytes are 8 in bf16."""


def seconds(run: Callable[[], None]) -> float:
    """Best of three, each the mean of RUNS calls in a row, by CUDA events."""
    found = []
    run()
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(RUNS):
            run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000 / RUNS)
    return min(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_visits_move_at_most_eight_bytes_a_bf16_logit(dtype: torch.dtype) -> None:
    if not device.has_triton():
        pytest.skip("needs triton")
    logits, targets = random_logits(dtype), token_inputs()["targets"]
    out = torch.empty_like(logits)
    shard = VocabShard.of(WIDTH, None, VOCAB)
    visitor = RowVisitor(shard, temperature=1.0, with_entropy=True)
    rows = visitor.merge(visitor.statistics(logits, targets), targets)
    ones = torch.ones_like(rows.logprobs)
    gradient = visitor.gradient(targets, rows.peak, rows.sumexp, rows.entropy, ones, 0.1 * ones)

    def visit() -> None:
        visitor.statistics(logits, targets)
        visitor.write_gradient(logits, targets, gradient, out=out)

    bandwidth = 2 * logits.nbytes / seconds(lambda: out.copy_(logits))
    moved = seconds(visit) * bandwidth / logits.numel()
    print(f"{dtype}: {moved:.2f} bytes a logit at the {bandwidth / 1e9:.0f} GB/s of a copy")
    assert moved <= MOST_MOVES * dtype.itemsize


def peak_beyond(run: Callable[[], Tensor], leaves: list[Tensor]) -> int:
    """Most bytes allocated during `run` and its backward, beyond what there was before."""
    for _ in range(2):  # the first visit loads kernels and cuBLAS workspaces
        for leaf in leaves:
            leaf.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run().backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("way", ["fused", "two_step"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_beyond_the_logits_a_loss_holds_a_hundredth_of_them(dtype: torch.dtype, way: str) -> None:
    leaf, given = random_logits(dtype).requires_grad_(), token_inputs()

    def run() -> Tensor:
        if way == "fused":
            terms = policy_cross_entropy(leaf, None, **given, config=CONFIG, real_vocab_size=VOCAB)
            return terms.loss_sum
        logprobs, entropy = vocab_parallel_logprobs(leaf, given["targets"], real_vocab_size=VOCAB)
        return logprobs.sum() + entropy.sum()

    extra = peak_beyond(run, [leaf])
    print(f"{way} {dtype}: {extra / 2**20:.1f} MiB beyond {leaf.nbytes / 2**20:.0f} MiB of logits")
    bar = 0.01 if device.has_triton() else 0.5  # plain torch visits blocks of BLOCK_BYTES
    assert extra <= bar * leaf.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_hidden_states_one_block_of_logits_is_held(dtype: torch.dtype) -> None:
    leaves = [tensor.requires_grad_() for tensor in random_head(dtype)]
    given, main_grad = token_inputs(), torch.zeros(WIDTH, HIDDEN, device="cuda")

    def run() -> Tensor:
        return policy_cross_entropy(
            *leaves,
            **given,
            config=CONFIG,
            real_vocab_size=VOCAB,
            main_grad=main_grad,
            incoming_scale=1.0,
        ).loss_sum

    extra = peak_beyond(run, leaves) - leaves[0].nbytes
    block = GPU_ROWS * WIDTH * (4 if dtype == torch.float32 else 4 + 2)  # fp32 logits, gradient
    print(f"{dtype}: {extra / 2**20:.0f} MiB, a block has {block / 2**20:.0f} MiB")
    bar = 1.1 if device.has_triton() else 2.5
    assert extra <= bar * block
