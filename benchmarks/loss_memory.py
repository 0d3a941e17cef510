"""Peak memory of the loss beyond logits that exist, each case in a fresh process.

    python benchmarks/loss_memory.py [--tokens 2048] [--vocab 151936] [--hidden 256]

The high-water mark of the resident set during forward and backward, minus the resident set before,
over the size of the logits: those that were given, or those that would have been. Three sources:

    logits     logits that exist; their gradient takes their place
    hidden     hidden states and weight; their gradients, which are returned, are taken off
    main_grad  the same as training has it: the weight's gradient goes into a main_grad that is
               given, the loss knows what its sum will be multiplied by, and nothing is taken off

A tiny pass comes before, so that what torch loads once in a process (30 MiB) is not counted. Linux
only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.linear_head import linear_logprobs
from megatron_dapo.loss.policy_cross_entropy import policy_cross_entropy
from megatron_dapo.loss.policy_loss import policy_loss
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs

BARS = {
    ("logits", "float32"): 0.05,
    ("logits", "bfloat16"): 0.10,
    ("hidden", "float32"): 0.10,
    ("hidden", "bfloat16"): 0.10,
    ("main_grad", "float32"): 0.10,
    ("main_grad", "bfloat16"): 0.10,
}
TRAINING_HIDDEN = 2048
"""Least width of the hidden states with main_grad: a second copy of the weight would show."""
WAYS = ("fused", "two_step")


def status_kib(field: str) -> int:
    """A line of /proc/self/status: VmRSS is now, VmHWM the most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def peak_of(run: Callable[[], Tensor | None]) -> tuple[Tensor | None, int]:
    """Result, and the most KiB that were resident meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")
    return run(), status_kib("VmHWM")


def token_inputs(tokens: int, vocab: int) -> dict[str, Tensor]:
    return {
        "targets": torch.randint(0, vocab, (tokens,)),
        "old_logprobs": torch.full((tokens,), -12.0) + 0.1 * torch.randn(tokens),
        "advantages": torch.randn(tokens),
        "loss_mask": torch.rand(tokens) < 0.9,
    }


def finish_two_step(outputs: tuple[Tensor, Tensor | None], given: dict[str, Tensor]) -> Tensor:
    logprobs, entropy = outputs
    terms = policy_loss(
        logprobs,
        given["old_logprobs"],
        given["advantages"],
        given["loss_mask"],
        torch.zeros_like(given["targets"]),
        num_sequences=1,
        config=LossConfig(),
        entropy=entropy,
    )
    return terms.loss_sum


def prepare(
    source: str, way: str, dtype: torch.dtype, tokens: int, vocab: int, hidden: int
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """(forward, tensors whose gradients are not counted)."""
    given, config = token_inputs(tokens, vocab), LossConfig()
    if source == "logits":
        logits = torch.empty(tokens, vocab, dtype=dtype)
        for row in logits:
            row.copy_(2.5 * torch.randn(vocab))
        logits.requires_grad_()
        if way == "fused":
            return lambda: policy_cross_entropy(logits, None, **given, config=config).loss_sum, []
        return lambda: finish_two_step(vocab_parallel_logprobs(logits, given["targets"]), given), []
    states = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden) / hidden**0.5).to(dtype).requires_grad_()
    main_grad = torch.zeros(vocab, hidden).add_(1.0) if source == "main_grad" else None
    returned = [states, weight] if main_grad is None else []
    if way == "fused":
        known = {"main_grad": main_grad, "incoming_scale": None if main_grad is None else 1.0}
        return (
            lambda: policy_cross_entropy(states, weight, **given, config=config, **known).loss_sum,
            returned,
        )
    return (
        lambda: finish_two_step(
            linear_logprobs(states, weight, given["targets"], main_grad=main_grad), given
        ),
        returned,
    )


def measure(source: str, way: str, dtype_name: str, tokens: int, vocab: int, hidden: int) -> dict:
    """One case in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    if source == "main_grad":
        hidden = max(hidden, TRAINING_HIDDEN)
    prepare(source, way, dtype, 8, 64, 8)[0]().backward()
    forward, leaves = prepare(source, way, dtype, tokens, vocab, hidden)
    before = status_kib("VmRSS")
    loss, peak_forward = peak_of(forward)
    _, peak_backward = peak_of(loss.backward)
    returned = sum(leaf.grad.nbytes for leaf in leaves)
    formed = 0  # gradient of the hidden states, and of the weight in fp32
    if leaves:
        formed = leaves[0].nbytes + 4 * leaves[1].numel()
    gradients = returned if dtype == torch.float32 else returned + formed
    formed = formed if way == "fused" else 0  # by forward
    extra = 1024 * max(
        peak_forward - before - formed // 1024, peak_backward - before - gradients // 1024
    )
    logits_bytes = tokens * vocab * dtype.itemsize
    return {
        "from": source,
        "way": way,
        "dtype": dtype_name,
        "tokens": tokens,
        "hidden": None if source == "logits" else hidden,
        "logits_mib": round(logits_bytes / 2**20, 1),
        "extra_mib": round(extra / 2**20, 1),
        "ratio": round(extra / logits_bytes, 4),
        "bar": BARS[source, dtype_name],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--case", nargs=3, metavar=("FROM", "WAY", "DTYPE"), help="only this one")
    arguments = parser.parse_args()
    sizes = (arguments.tokens, arguments.vocab, arguments.hidden)
    if arguments.case:
        print(json.dumps(measure(*arguments.case, *sizes)))
        return
    failed = False
    for source, dtype in BARS:
        for way in WAYS:
            command = [sys.executable, __file__, "--case", source, way, dtype]
            for name, value in zip(("tokens", "vocab", "hidden"), sizes, strict=True):
                command += [f"--{name}", str(value)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            result = json.loads(done.stdout.splitlines()[-1])
            failed = failed or result["ratio"] > result["bar"]
            print(json.dumps(result), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
