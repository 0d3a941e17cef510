"""The probe: after an update, one short sample of each engine that the trainer scores too.

Digests prove that the engine holds the trainer's numbers; the probe proves that both compute the
same with them, cached prompts and repacked kernels included.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config import RunConfig
from megatron_dapo.rollout.engine import EngineError, GenerationRequest, GenerationResult
from megatron_dapo.rollout.seeds import sample_seed
from megatron_dapo.types import MicroBatch, RolloutBatch

if TYPE_CHECKING:
    from megatron_dapo.parallel.context import ParallelContext

LONGEST_PROMPT = 64
"""Tokens of a prompt that a probe keeps."""
FP32_TOLERANCE = 1e-3
ROUNDED_TOLERANCE = 0.1
"""Where engine or trainer computes in bfloat16 or less."""
PROBE_METRIC = "rollout/probe_logprob_diff"


@dataclass(frozen=True, slots=True)
class Probe:
    """What one engine sampled right after an update."""

    engine: int
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One for each response token, by the engine."""
    policy_version: int


async def probe_engine(
    sample: Callable[[GenerationRequest], Awaitable[GenerationResult]],
    prompt_token_ids: Sequence[int],
    config: RunConfig,
    *,
    number: int,
) -> Probe:
    """Sample `resharding.probe_tokens` tokens: the same for the same weights and engine number.

    They come from the rollout's own distribution, since that is whose log-probs `Policy.logprobs`
    gives. (Those of a greedy request are of temperature 1, whatever the rollout's is.)

    Args:
        sample: has the engine answer, although it takes no other requests yet.
        number: of the engine.

    Raises:
        EngineError: the engine does not answer with the tokens that were asked for.
    """
    request = GenerationRequest(
        prompt_token_ids=tuple(prompt_token_ids[:LONGEST_PROMPT]),
        seed=sample_seed(config.seed, 0, number, 0, purpose="probe"),
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        max_tokens=min(config.resharding.probe_tokens, config.rollout.max_response_tokens),
        stop_token_ids=(),
        request_id=f"probe-{number}",
    )
    result = await sample(request)
    if len(result.token_ids) != request.max_tokens:
        raise EngineError(
            f"rollout engine {number} answered a probe of {request.max_tokens} tokens with "
            f"{len(result.token_ids)}, finish reason {result.finish_reason}"
        )
    return Probe(
        engine=number,
        prompt_token_ids=request.prompt_token_ids,
        response_token_ids=result.token_ids,
        logprobs=result.logprobs,
        policy_version=result.policy_version,
    )


def probe_batch(probes: Sequence[Probe]) -> RolloutBatch:
    """The probes as a batch: a row for each, its group the engine's number."""
    rows = len(probes)
    sequences = ((probe.prompt_token_ids, probe.response_token_ids) for probe in probes)
    ids = list(chain.from_iterable(chain.from_iterable(sequences)))
    logprobs = list(chain.from_iterable(probe.logprobs for probe in probes))
    return RolloutBatch(
        tokens=torch.tensor(ids, dtype=torch.int64),
        prompt_tokens=torch.tensor([len(probe.prompt_token_ids) for probe in probes]),
        response_tokens=torch.tensor([len(probe.response_token_ids) for probe in probes]),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        rewards=torch.zeros(rows),
        advantages=torch.zeros(rows),
        trained=torch.ones(rows, dtype=torch.bool),
        group_index=torch.tensor([probe.engine for probe in probes]),
        policy_version=torch.tensor([probe.policy_version for probe in probes]),
    )


def probe_tolerance(config: RunConfig) -> float:
    """Largest mean |log-prob difference| between engine and trainer, nats."""
    if config.resharding.probe_tolerance is not None:
        return config.resharding.probe_tolerance
    dtypes = {config.model.dtype, config.rollout.engine_dtype} - {"auto"}
    exact = config.precision.fp8 == "none" and config.rollout.engine_quantization is None
    return FP32_TOLERANCE if exact and dtypes == {"float32"} else ROUNDED_TOLERANCE


def check_probes(
    batch: RolloutBatch,
    scored: Sequence[MicroBatch],
    config: RunConfig,
    parallel: ParallelContext,
) -> dict[str, float]:
    """Compare what engines and trainer think of the probes. Collective over the control group.

    Every rank calls it; all get the same numbers, so that all stop together.

    Args:
        batch: `probe_batch`, the same on every rank.
        scored: what `Policy.logprobs` made of this rank's packs of it.

    Returns:
        The largest difference of an engine, under its metric's name.

    Raises:
        RuntimeError: an engine and the trainer differ by more than `resharding.probe_tolerance`.
    """
    sums = torch.zeros(batch.num_responses, 2, dtype=torch.float64)
    if parallel.is_last_stage and parallel.tp_rank == 0 and parallel.cp_rank == 0:
        for micro_batch in scored:
            sums += _difference_sums(micro_batch, batch.num_responses)
    dist.all_reduce(sums, group=parallel.control_group)
    means = sums[:, 0] / sums[:, 1]
    allowed = probe_tolerance(config)
    engines, versions = batch.group_index.tolist(), batch.policy_version.tolist()
    for engine, version, mean in zip(engines, versions, means.tolist(), strict=True):
        if not mean <= allowed:
            raise RuntimeError(
                f"rollout engine {engine} at policy version {version}: log-probs of its probe "
                f"differ from the trainer's by {mean:.3g} nats in the mean, allowed are "
                f"{allowed:.3g} (resharding.probe_tolerance). Engine and trainer do not compute "
                "the same policy; training on its samples would be wrong without a sign of it"
            )
    return {PROBE_METRIC: means.max().item()}


def _difference_sums(micro_batch: MicroBatch, num_probes: int) -> Tensor:
    """[probes, 2] float64: sum of |difference| and number of tokens of each probe in this pack."""
    assert micro_batch.old_logprobs is not None, "the last stage scores the probes"
    mask = micro_batch.loss_mask
    gaps = (micro_batch.old_logprobs[mask] - micro_batch.rollout_logprobs[mask]).double().abs()
    sums = torch.zeros(num_probes, 2, dtype=torch.float64)
    if micro_batch.num_sequences:
        rows = micro_batch.rows[micro_batch.sequence_index[mask]]
        sums.index_add_(0, rows, torch.stack([gaps, torch.ones_like(gaps)], dim=1))
    return sums
