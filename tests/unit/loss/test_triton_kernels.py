"""The Triton kernels on CPU tensors in Triton's interpreter, against float64 and the torch path.

The interpreter must be chosen before triton is imported, so these tests run in a process of their
own, which the first one starts.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss import shards
from megatron_dapo.loss.policy_cross_entropy import policy_cross_entropy
from megatron_dapo.loss.shards import RowGradient, RowVisitor, VocabShard
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs
from megatron_dapo.types import NO_LABEL
from tests.conftest import REPOSITORY
from tests.unit.loss.test_vocab_parallel import WILD_ROWS, case, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BF16_ULP = 2.0**-7
"""The interpreter cuts a bf16 result off, where a GPU rounds it."""

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET")
Use = Callable[[], None]
Handle = Any
"""A value of the interpreter."""


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_the_kernels_pass_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


POINTERS = {"labels": "*i64", "active": "*i1", "out": "*bf16", "logits": "*bf16"}
ALIGNED = ("logits", "out", "labels", "row_stride", "out_stride", "width")


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@pytest.mark.parametrize(
    ("kernel", "switches", "wide"),
    [
        ("_statistics_kernel", {"WITH_ENTROPY": True, "STEPS": 8, "LANES": 1024}, ["ld"]),
        ("_gradient_kernel", {"WITH_SLOPE": True, "BLOCK": 4096}, ["ld", "st"]),
    ],
)
def test_the_kernels_compile_for_hopper_with_wide_loads_and_stores(
    kernel: str, switches: dict[str, int], wide: list[str]
) -> None:
    """The whole way to machine code, which needs no device."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megatron_dapo.loss import triton_kernels

    function = vars(triton_kernels)[kernel]
    names = function.arg_names
    numbers = dict.fromkeys(
        ("row_stride", "out_stride", "blocks", "width", "columns", "first"), "i32"
    )
    types = dict.fromkeys(names, "*fp32") | POINTERS | numbers | {"c": "fp32"}
    types |= dict.fromkeys(switches, "constexpr")
    if kernel == "_statistics_kernel":
        types["out"] = "*fp32"
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED if name in names}
    source = ASTSource(function, {name: types[name] for name in names}, switches, aligned)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert built.asm["cubin"]
    for instruction in wide:
        assert re.search(rf"{instruction}\.global\.v4\.b32", built.asm["ptx"]), instruction


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Call it, and what follows visits rows with the kernels."""
    from megatron_dapo.loss import triton_kernels

    return lambda: monkeypatch.setattr(shards, "device_kernels", lambda *rows: triton_kernels)


def visit(logits: Tensor, targets: Tensor, vocab: int, temperature: float) -> tuple[Tensor, Tensor]:
    """[logprobs, entropy] and the gradient of a weighted sum of both."""
    leaf = logits.clone().requires_grad_()
    got = vocab_parallel_logprobs(
        leaf, targets, temperature=temperature, real_vocab_size=vocab, inplace_backward=False
    )
    weights = torch.randn(2, targets.numel(), generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad((torch.stack(got) * weights.to(got[0])).sum(), leaf)
    return torch.stack(got).detach(), grad


def exact_visit(
    logits: Tensor, targets: Tensor, vocab: int, temperature: float
) -> tuple[Tensor, Tensor]:
    leaf = logits.double().requires_grad_()
    wanted = torch.stack(reference(leaf, targets, temperature, vocab))
    weights = torch.randn(2, targets.numel(), generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad((wanted * weights.double()).sum(), leaf)
    return wanted.detach(), grad


@interpreted
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("tokens", "width", "vocab"),
    [(23, 40, 40), (23, 40, 33), (5, 8192, 8192), (5, 20000, 18993), (3, 151936, 151643)],
)
@pytest.mark.parametrize(
    ("dtype", "gradient_error"), [(torch.float32, 2e-6), (torch.bfloat16, BF16_ULP)]
)
def test_values_and_gradients_are_those_of_log_softmax(
    dtype: torch.dtype,
    gradient_error: float,
    tokens: int,
    width: int,
    vocab: int,
    temperature: float,
    use_kernels: Use,
) -> None:
    logits, targets = case(dtype, tokens=tokens, width=width, vocab=vocab)
    logits[:, vocab:] = math.nan
    use_kernels()
    got, grad = visit(logits, targets, vocab, temperature)
    wanted, wanted_grad = exact_visit(logits, targets, vocab, temperature)
    torch.testing.assert_close(got[0].double(), wanted[0], atol=5e-6, rtol=0)
    torch.testing.assert_close(got[1].double(), wanted[1], atol=1e-5, rtol=0)
    assert grad.dtype == dtype
    assert (grad[:, vocab:] == 0).all()
    real, right = grad[:, :vocab].double(), wanted_grad[:, :vocab]
    floor = 1e-7 * right.abs().amax(1, keepdim=True)
    assert ((real - right).abs() <= gradient_error * right.abs() + 20 * floor).all()


@interpreted
def test_an_offset_of_the_logits_costs_no_accuracy(
    use_kernels: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import interpreter

    def rounds_once(_: object, x: Handle, y: Handle, z: Handle) -> Handle:
        exact = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    # some versions of the interpreter round twice, as no GPU does
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", rounds_once)
    logits, targets = case(torch.float32, width=9000, vocab=9000)
    use_kernels()
    for temperature in (1.0, 0.7):
        got, _ = visit(logits + 3000.0, targets, 9000, temperature)
        wanted, _ = exact_visit(logits + 3000.0, targets, 9000, temperature)
        torch.testing.assert_close(got.double(), wanted, atol=5e-6, rtol=0)


@interpreted
@pytest.mark.parametrize("label", [0, 1])
def test_logits_of_any_size_have_log_probs(label: int, use_kernels: Use) -> None:
    use_kernels()
    logits, targets = torch.tensor(WILD_ROWS), torch.full((len(WILD_ROWS),), label)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    table = exact.log_softmax(-1)
    logprobs, entropy = vocab_parallel_logprobs(leaf, targets)
    torch.testing.assert_close(logprobs.double(), table[:, label], atol=2e-6, rtol=2e-6)
    wanted = -(table.exp() * table).sum(-1)
    torch.testing.assert_close(entropy.double(), wanted, atol=2e-6, rtol=2e-6)
    (grad,) = torch.autograd.grad(logprobs.sum(), leaf)
    (right,) = torch.autograd.grad(table[:, label].sum(), exact)
    torch.testing.assert_close(grad.double(), right, atol=2e-6, rtol=2e-6)


@interpreted
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_stays_in_its_row(garbage: float, use_kernels: Use) -> None:
    logits, targets = case(torch.float32, width=9000, vocab=9000)
    clean, clean_grad = visit(logits, targets, 9000, 1.0)
    unlabelled, labelled = targets == NO_LABEL, 5
    logits[unlabelled] = garbage
    logits[labelled, 17] = garbage
    use_kernels()
    got, grad = visit(logits, targets, 9000, 1.0)
    assert (got[:, unlabelled] == 0).all() and (grad[unlabelled] == 0).all()
    assert got[:, labelled].isfinite().all() == (garbage == -math.inf)
    others = torch.arange(targets.numel()) != labelled
    others &= ~unlabelled
    torch.testing.assert_close(got[:, others], clean[:, others], atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(grad[others], clean_grad[others], atol=1e-6, rtol=1e-5)


@interpreted
def test_a_row_without_incoming_gradient_gets_none_whatever_it_holds(use_kernels: Use) -> None:
    logits, targets = case(torch.float32)
    logits[5] = math.nan
    use_kernels()
    leaf = logits.requires_grad_()
    outputs = vocab_parallel_logprobs(leaf, targets)
    incoming = torch.ones_like(outputs[0])
    incoming[5] = 0.0
    (grad,) = torch.autograd.grad(outputs, leaf, (incoming, incoming))
    assert grad.data_ptr() == leaf.data_ptr()
    assert (grad[5] == 0).all()
    assert grad.isfinite().all()


@interpreted
def test_a_forbidden_token_has_probability_zero_and_no_gradient(use_kernels: Use) -> None:
    use_kernels()
    logits = torch.tensor([[1.0, -math.inf, 0.0]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([0]))
    wanted = torch.tensor([1.0, 0.0]).log_softmax(0)
    assert logprobs.item() == pytest.approx(wanted[0].item())
    assert entropy.item() == pytest.approx(-(wanted.exp() * wanted).sum().item())
    (grad,) = torch.autograd.grad(logprobs + entropy, logits)
    assert grad[0, 1] == 0
    assert grad.isfinite().all()


@interpreted
@pytest.mark.parametrize("columns", [9000, 8500, 0])
def test_a_shard_sees_what_the_torch_path_sees(columns: int, use_kernels: Use) -> None:
    first, width = 9000, 9000
    logits, targets = case(torch.float32, width=width, vocab=9000)
    targets = torch.where(targets == NO_LABEL, targets, 2 * targets)  # about half are this rank's
    shard = VocabShard(width, columns, first, first + max(columns, 1), None)
    visitor = RowVisitor(shard, temperature=0.7, with_entropy=True)
    statistics = visitor.statistics(logits, targets)
    g = torch.Generator().manual_seed(2)
    active = targets != NO_LABEL
    scale, slope, target = torch.where(active, torch.randn(3, 23, generator=g), 0.0)
    gradient = RowGradient(active, statistics[0] + 1.0, scale, slope, target)
    wide, narrow = torch.empty_like(logits), torch.full(logits.shape, math.nan).bfloat16()
    visitor.write_gradient(logits, targets, gradient, out=wide)
    use_kernels()
    torch.testing.assert_close(
        visitor.statistics(logits, targets), statistics, atol=5e-6, rtol=2e-6
    )
    visitor.write_gradient(logits, targets, gradient, out=narrow)
    torch.testing.assert_close(narrow.float(), wide, atol=1e-7, rtol=BF16_ULP)


@interpreted
@pytest.mark.parametrize("with_entropy", [True, False])
def test_two_runs_agree_bit_by_bit_and_leave_the_entropy_out(
    with_entropy: bool, use_kernels: Use
) -> None:
    logits, targets = case(torch.bfloat16, width=9000, vocab=9000)
    use_kernels()
    whole, _ = vocab_parallel_logprobs(logits, targets)
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, with_entropy=with_entropy)
    assert torch.equal(whole, logprobs)
    assert (entropy is not None) == with_entropy


@interpreted
def test_rows_may_lie_apart_or_be_one_row_many_times(use_kernels: Use) -> None:
    use_kernels()
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2, 3])
    for logits in (wide[:, 20:60], wide[:1, :40].expand(4, 40)):
        leaf = logits.requires_grad_()
        logprobs, _ = vocab_parallel_logprobs(leaf, targets)
        wanted = torch.eye(40)[:4] - logits.detach().softmax(-1)
        (grad,) = torch.autograd.grad(logprobs.sum(), leaf)
        torch.testing.assert_close(grad, wanted)


@interpreted
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_the_fused_loss_is_that_of_the_torch_path(entropy_coef: float, use_kernels: Use) -> None:
    logits, targets = case(torch.float32, width=9000, vocab=9000)
    g = torch.Generator().manual_seed(4)
    old, advantages = torch.randn(2, 23, generator=g)
    old += vocab_parallel_logprobs(logits, targets)[0]
    rest = [targets, old, advantages, targets != NO_LABEL]
    config = LossConfig(entropy_coef=entropy_coef)
    found = []
    for prepare in (lambda: None, use_kernels):
        prepare()
        leaf = logits.clone().requires_grad_()
        terms = policy_cross_entropy(leaf, None, *rest, config=config)
        (grad,) = torch.autograd.grad(3 * terms.loss_sum, leaf)
        found.append([terms.loss_sum.detach(), terms.logprobs, terms.entropy, grad])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, atol=3e-6, rtol=1e-6)


@interpreted
def test_no_token_is_no_work(use_kernels: Use) -> None:
    use_kernels()
    leaf = torch.zeros(0, 8, requires_grad=True)
    logprobs, _ = vocab_parallel_logprobs(leaf, torch.zeros(0, dtype=torch.int64))
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
