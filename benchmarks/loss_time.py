"""CPU time of log-prob, exact entropy and DAPO loss, forward and backward, against Megatron-core.

    python benchmarks/loss_time.py [--tokens 512] [--vocab 151936] [--hidden 512] [--repeats 5]
    python benchmarks/loss_time.py --device cuda --tokens 8192 --hidden 4096 [--tp 1 2]

One thread a rank, all contestants in turn in the same processes, best of `--repeats`, the slowest
rank counts. CPU seconds, so waiting for a neighbour is not counted; still, run it on a quiet
machine. Freed memory stays with the process (glibc settings below), as a caching allocator keeps
it, which favours whoever allocates most. From logits the comparison is megatron-core's
vocab_parallel_cross_entropy, which has neither entropy nor loss, and the same plus a plain
entropy; from hidden states it is the three matrix products that no head can do without. In
bfloat16 that last ratio has no bar on CPU: the weight's gradient is summed in fp32, and no CPU
product takes bf16 factors to an fp32 sum, so the factors are widened first; on a GPU it does.

With --device cuda the seconds are those between two events, a rank has a device of its own, and
there are no bars.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron_dapo import device
from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.linear_head import linear_logprobs
from megatron_dapo.loss.policy_cross_entropy import policy_cross_entropy
from megatron_dapo.loss.policy_loss import policy_loss
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs

BARS: dict[tuple[str, str], float | None] = {
    ("float32", "fused / ce"): 1.3,
    ("bfloat16", "fused / ce"): 0.60,
    ("float32", "fused / ce_entropy"): 0.45,
    ("bfloat16", "fused / ce_entropy"): 0.45,
    ("float32", "head_fused / products"): 1.15,
    ("bfloat16", "head_fused / products"): None,
}
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}


def cpu_seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def device_seconds(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def best_seconds(
    contestants: Mapping[str, Callable[[], None]], reset: Callable[[], None], repeats: int
) -> dict[str, float]:
    """Best seconds of each, taking turns; `reset` runs before each and is not counted."""
    seconds = device_seconds if torch.get_default_device().type == "cuda" else cpu_seconds
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeats + 1):  # the first round warms up and often loses
        for name, run in contestants.items():
            reset()
            dist.barrier()
            best[name] = min(best[name], seconds(run))
    return best


def token_inputs(tokens: int, vocab: int) -> dict[str, Tensor]:
    g = torch.Generator(torch.get_default_device()).manual_seed(1)
    return {
        "targets": torch.randint(0, vocab, (tokens,), generator=g),
        "old_logprobs": -12.0 + 0.15 * torch.randn(tokens, generator=g),
        "advantages": torch.randn(tokens, generator=g),
        "loss_mask": torch.rand(tokens, generator=g) < 0.9,
    }


def dapo(outputs: tuple[Tensor, Tensor | None], given: Mapping[str, Tensor]) -> Tensor:
    logprobs, entropy = outputs
    return policy_loss(
        logprobs,
        given["old_logprobs"],
        given["advantages"],
        given["loss_mask"],
        torch.zeros_like(given["targets"]),
        num_sequences=1,
        config=LossConfig(),
        entropy=entropy,
    ).loss_sum


def plain_entropy(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Entropy in the usual three collectives, [tokens], without gradient."""
    with torch.no_grad():
        values = logits.float()
        peak = values.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shifted = values - peak[:, None]
        exp = shifted.exp()
        total = exp.sum(-1)
        dist.all_reduce(total, group=group)
        weighted = (exp / total[:, None] * shifted).sum(-1)
        dist.all_reduce(weighted, group=group)
        return total.log() - weighted


def from_logits(dtype: torch.dtype, tokens: int, vocab: int, repeats: int) -> dict[str, float]:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    group = dist.group.WORLD
    width = vocab // dist.get_world_size()
    given, source = token_inputs(tokens, vocab), torch.empty(tokens, width, dtype=dtype)
    for row in source:
        row.copy_(2.5 * torch.randn(width))
    logits = torch.empty_like(source).requires_grad_()

    def reset() -> None:
        with torch.no_grad():
            logits.copy_(source)

    def ce() -> None:
        loss = vocab_parallel_cross_entropy(logits[:, None], given["targets"][:, None])
        torch.autograd.grad(loss.sum(), logits)

    def ce_entropy() -> None:
        plain_entropy(logits, group)
        ce()

    def two_step() -> None:
        loss = dapo(vocab_parallel_logprobs(logits, given["targets"], tp_group=group), given)
        torch.autograd.grad(loss, logits)

    def fused() -> None:
        terms = policy_cross_entropy(logits, None, **given, config=LossConfig(), tp_group=group)
        torch.autograd.grad(terms.loss_sum, logits)

    contestants = {"ce": ce, "ce_entropy": ce_entropy, "two_step": two_step, "fused": fused}
    return best_seconds(contestants, reset, repeats)


def from_hidden(
    dtype: torch.dtype, tokens: int, vocab: int, hidden: int, repeats: int
) -> dict[str, float]:
    group = dist.group.WORLD
    width = vocab // dist.get_world_size()
    given = token_inputs(tokens, vocab)
    states = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    weight = (torch.randn(width, hidden) / hidden**0.5).to(dtype).requires_grad_()
    grad_states, grad_weight = torch.empty_like(states), torch.empty_like(weight)
    logits = torch.empty(tokens, width, dtype=dtype)

    def products() -> None:
        with torch.no_grad():
            torch.mm(states, weight.t(), out=logits)
            torch.mm(logits, weight, out=grad_states)
            torch.mm(logits.t(), states, out=grad_weight)

    def head_two_step() -> None:
        outputs = linear_logprobs(states, weight, given["targets"], tp_group=group)
        torch.autograd.grad(dapo(outputs, given), [states, weight])

    def head_fused() -> None:
        terms = policy_cross_entropy(states, weight, **given, config=LossConfig(), tp_group=group)
        torch.autograd.grad(terms.loss_sum, [states, weight])

    contestants = {
        "products": products,
        "head_two_step": head_two_step,
        "head_fused": head_fused,
    }
    return best_seconds(contestants, lambda: None, repeats)


def measure(rank: int, world: int, store: str, arguments: argparse.Namespace) -> None:
    """All contestants on one rank; rank 0 writes the slowest rank's seconds."""
    torch.set_num_threads(1)
    if arguments.device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
    torch.manual_seed(rank)
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    device.install_cpu_support()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    results = {}
    for name in arguments.dtypes:
        dtype = getattr(torch, name)
        seconds = from_logits(dtype, arguments.tokens, arguments.vocab, arguments.repeats)
        seconds |= from_hidden(
            dtype, arguments.tokens, arguments.vocab, arguments.hidden, arguments.repeats
        )
        slowest = torch.tensor(list(seconds.values()))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        results[name] = dict(zip(seconds, slowest.tolist(), strict=True))
    if rank == 0:
        Path(f"{store}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def report(world: int, kind: str, results: Mapping[str, Mapping[str, float]]) -> bool:
    """Print seconds and ratios against the bars of a CPU; True where all hold."""
    passed = True
    for dtype, seconds in results.items():
        rounded = {name: round(value, 4) for name, value in seconds.items()}
        print(json.dumps({"tp": world, "dtype": dtype, f"{kind}_seconds": rounded}), flush=True)
        for (bar_dtype, pair), bar in BARS.items():
            if bar_dtype == dtype:
                bar = bar if kind == "cpu" else None
                mine, other = pair.split(" / ")
                ratio = seconds[mine] / seconds[other]
                passed = passed and (bar is None or ratio <= bar)
                limit = "no bar" if bar is None else f"bar {bar}"
                print(f"  {pair:24s} {ratio:.3f}  ({limit})", flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tp", type=int, nargs="+", help="1 2; on cuda as far as devices go")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    os.environ.update(KEEP_FREED_MEMORY)  # read by the processes spawned below
    passed = True
    most = 2 if arguments.device == "cpu" else torch.cuda.device_count()
    for world in arguments.tp or [size for size in (1, 2) if size <= most]:
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            mp.spawn(measure, (world, store, arguments), nprocs=world, join=True)
            results = Path(f"{store}.json")
            passed = report(world, arguments.device, json.loads(results.read_text())) and passed
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
