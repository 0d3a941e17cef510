"""MoE auxiliary losses beside a policy loss that is divided by its own denominator.

Megatron multiplies a router's auxiliary loss by the tokens that this rank routes and later
divides all gradients by the sum of the denominators, taking both for the same number. Here they
are not: prompts and padding are routed but do not count, and a sequence mean counts responses.
The coefficients are rescaled for each update, so that what reaches the weights is

    coefficient * mean over data ranks and micro-batches of the auxiliary loss of a micro-batch.

Padding counts among a micro-batch's tokens. Megatron's padding mask would leave it out, but weighs
each tensor and context rank's part by that rank's own number of real tokens, and stages after the
first do not cut it for sequence parallelism (megatron-core 0.16.1): the loss would depend on the
layout.

A router sees this rank's part of a micro-batch: its context rank's tokens, cut once more by
sequence parallelism. Its gradient sums over those parts. Megatron-core 0.16 to 0.18 multiplies by
the tokens of the part, 0.19 by those of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megatron_dapo import device
from megatron_dapo.config.schema import MoeConfig
from megatron_dapo.config.versions import megatron_release
from megatron_dapo.loss.denominators import Ledger
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.types import MicroBatch

device.install_cpu_support()

from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402


def balance_aux_losses(
    chunks: Sequence[GPTModel],
    micro_batches: Sequence[MicroBatch],
    ledger: Ledger,
    config: MoeConfig,
    parallel: ParallelContext,
) -> None:
    """Set the auxiliary-loss coefficients of `chunks` for this update.

    Every rank calls it, with its context rank's part of the micro-batches. Communicates, where
    an auxiliary loss is on: the denominator, over the dp_cp_group.
    """
    transformer = chunks[0].config
    if transformer.num_moe_experts is None or not (config.aux_loss_coef or config.z_loss_coef):
        return
    denominator = sum(ledger.denominator(micro_batch) for micro_batch in micro_batches)
    dist.all_reduce(denominator, group=parallel.dp_cp_group)
    multiplied = megatron_factor(
        micro_batches[0].num_tokens // (parallel.tp_size if transformer.sequence_parallel else 1),
        parallel.tp_size * parallel.cp_size,
    )
    scale = int(denominator) / (multiplied * len(micro_batches) * parallel.dp_size)
    transformer.moe_aux_loss_coeff = config.aux_loss_coef * scale
    transformer.moe_z_loss_coeff = config.z_loss_coef * scale or None


def megatron_factor(routed: int, parts: int) -> int:
    """What Megatron multiplies an auxiliary loss by under `calculate_per_token_loss`.

    Args:
        routed: tokens that this rank's routers see of one micro-batch.
        parts: tensor x context parallel ranks.
    """
    return routed * parts if megatron_release() >= (0, 19) else routed
