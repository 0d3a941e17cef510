"""Megatron's DDP and AdamW around the model chunks, and one guarded optimizer step.

Megatron takes Transformer Engine's fused Adam, else NVIDIA apex's, else torch's AdamW.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo import device
from megatron_dapo.config.schema import OptimizerConfig, RunConfig
from megatron_dapo.config.versions import megatron_release

device.install_cpu_support()

from megatron.core import optimizer as megatron_optimizer  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # noqa: E402
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer  # noqa: E402

logger = logging.getLogger(__name__)


class StepOutcome(NamedTuple):
    """What one optimizer step did, the same on every rank."""

    grad_norm: float
    """Global norm before clipping; NaN or infinite when skipped."""
    skipped: bool


def warmup_lr(step: int, config: OptimizerConfig) -> float:
    """Learning rate of rollout step `step` (from 1): linear over the first `warmup_steps`."""
    if step < 1:
        raise ValueError(f"rollout step {step}: steps count from 1")
    return config.lr * min(1.0, step / config.warmup_steps) if config.warmup_steps else config.lr


def wrap_chunks(chunks: Sequence[GPTModel], config: RunConfig) -> list[DistributedDataParallel]:
    """Megatron DDP around each chunk: gradients accumulate in fp32 and sum over data ranks.

    Every rank calls it. Averages nothing: Megatron's finalisation divides once, by the tokens.
    """
    transformer = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.training.overlap_grad_reduce,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        average_in_collective=False,
        fp8_param_gather=config.precision.fp8_param_gather,
    )
    wrapped = [
        DistributedDataParallel(transformer, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    transformer.finalize_model_grads_func = finalize_model_grads
    if config.training.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def build_optimizer(
    wrapped: Sequence[DistributedDataParallel], config: RunConfig, settings: OptimizerConfig
) -> ChainedOptimizer:
    """AdamW over the wrapped chunks; biases and norms do not decay (Megatron's rule).

    Every rank calls it. Communicates: names of the parameter groups.
    """
    bf16 = config.model.dtype == "bfloat16"
    optimizer = megatron_optimizer.get_megatron_optimizer(
        megatron_optimizer.OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            clip_grad=settings.clip_grad,
            use_distributed_optimizer=config.parallel.distributed_optimizer,
        ),
        list(wrapped),
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    logger.info("optimizer: AdamW of %s", adam_source())
    return optimizer


def adam_source() -> str:
    """Package whose Adam runs: transformer_engine, apex or torch.

    PyPI's `apex` is an unrelated package; NVIDIA's is told by its `apex.optimizers`.
    """
    if importlib.util.find_spec("apex") and not importlib.util.find_spec("apex.optimizers"):
        logger.warning(
            "the installed `apex` is not NVIDIA's (it has no apex.optimizers) and is not used; "
            "uninstall it, and build NVIDIA apex from source for its fused kernels"
        )
    return megatron_optimizer.Adam.__module__.partition(".")[0]


def set_lr(optimizer: ChainedOptimizer, lr: float) -> None:
    """Learning rate of every parameter group from now on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def global_grad_norm(optimizer: ChainedOptimizer) -> float:
    """Norm of the gradients over all ranks, summed in float64, the same on every rank.

    A sum in fp32 moves with how the gradients are cut into shards: by 1e-6 already for tensors of
    65k elements on CPU. Every rank calls it, after `prepare_grads`. Communicates: one float64 for
    each part of the optimizer (dense, experts), over the ranks that hold its gradients.
    """
    total = 0.0
    for part in optimizer.chained_optimizers:
        squares = torch.zeros((), dtype=torch.float64, device=device.current())
        for grad in _grads_for_norm(part):
            squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
        dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
        total += squares.item()
    return math.sqrt(total)


def _grads_for_norm(part: MegatronOptimizer) -> list[Tensor]:
    """This rank's gradients, each held by one tensor rank only; megatron-core 0.19 renamed them."""
    if megatron_release() >= (0, 19):
        return part.get_grads_for_grad_norm()
    return part.get_main_grads_for_grad_norm()


@torch.no_grad()
def guarded_step(optimizer: ChainedOptimizer, *, clip_grad: float) -> StepOutcome:
    """Clip and step, or leave the weights as they are when the gradient is not finite.

    Every rank calls it, after `accumulate_gradients`. The norm is global, so all ranks decide
    alike. A skipped step changes neither weights nor Adam's moments nor its step count.

    Args:
        clip_grad: global gradient norm above which the gradient is scaled down to it.
    """
    optimizer.prepare_grads()
    grad_norm = global_grad_norm(optimizer)
    if not math.isfinite(grad_norm):
        return StepOutcome(grad_norm, skipped=True)
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, clip_grad, grad_norm)
    optimizer.step_with_ready_grads()
    return StepOutcome(grad_norm, skipped=False)
