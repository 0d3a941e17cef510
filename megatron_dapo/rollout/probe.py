"""The probe: after an update, one short sample of each engine that the trainer scores too.

Digests prove that the engine holds the trainer's numbers; the probe proves that both compute the
same with them, cached prompts and repacked kernels included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config import RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.rollout.engine import GenerationRequest, GenerationResult
from megatron_dapo.rollout.seeds import sample_seed
from megatron_dapo.types import MicroBatch, RolloutBatch

LONGEST_PROMPT = 64
"""Tokens of a prompt that a probe keeps."""
FP32_TOLERANCE = 1e-3
ROUNDED_TOLERANCE = 0.1
"""Where engine or trainer computes in bfloat16 or less."""
PROBE_METRIC = "rollout/probe_logprob_diff"


@dataclass(frozen=True, slots=True)
class Probe:
    """What one engine sampled right after an update."""

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One for each response token, by the engine."""
    policy_version: int


def probe_request(
    prompt_token_ids: Sequence[int], config: RunConfig, *, policy_version: int, engine: int
) -> GenerationRequest:
    """The request that makes a probe: the same for the same run, version and engine.

    It samples from the rollout's own distribution, since that is whose log-probs `Policy.logprobs`
    gives. (Those of a greedy request are of temperature 1, whatever the rollout's is.)
    """
    return GenerationRequest(
        prompt_token_ids=tuple(prompt_token_ids[:LONGEST_PROMPT]),
        seed=sample_seed(config.seed, policy_version, engine, 0, purpose="probe"),
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        max_tokens=min(config.resharding.probe_tokens, config.rollout.max_response_tokens),
        stop_token_ids=(),
        request_id=f"probe-{policy_version}-{engine}",
    )


def probe_of(request: GenerationRequest, result: GenerationResult) -> Probe:
    """A request of `probe_request` and its answer."""
    return Probe(
        prompt_token_ids=request.prompt_token_ids,
        response_token_ids=result.token_ids,
        logprobs=result.logprobs,
        policy_version=result.policy_version,
    )


def probe_batch(probes: Sequence[Probe]) -> RolloutBatch:
    """The probes as a batch, one row for each engine, ready to be shared and packed."""
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
        group_index=torch.arange(rows),
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
    scored: Sequence[MicroBatch],
    num_probes: int,
    config: RunConfig,
    *,
    policy_version: int,
    parallel: ParallelContext,
) -> dict[str, float]:
    """Compare what engines and trainer think of the probes. Collective over the control group.

    Every rank calls it with what `Policy.logprobs` made of its own packs of `probe_batch`; all
    of them get the same numbers, so that all stop together.

    Returns:
        The largest difference of an engine, under its metric's name.

    Raises:
        RuntimeError: an engine and the trainer differ by more than `resharding.probe_tolerance`.
    """
    sums = torch.zeros(num_probes, 2, dtype=torch.float64)
    if parallel.is_last_stage and parallel.tp_rank == 0 and parallel.cp_rank == 0:
        for micro_batch in scored:
            sums += _difference_sums(micro_batch, num_probes)
    dist.all_reduce(sums, group=parallel.control_group)
    means = (sums[:, 0] / sums[:, 1]).tolist()
    allowed = probe_tolerance(config)
    for engine, mean in enumerate(means):
        if not mean <= allowed:
            raise RuntimeError(
                f"rollout engine {engine} at policy version {policy_version}: log-probs of the "
                f"probe differ from the trainer's by {mean:.3g} nats in the mean, allowed are "
                f"{allowed:.3g} (resharding.probe_tolerance). Engine and trainer do not compute "
                "the same policy; training on its samples would be wrong without a sign of it"
            )
    return {PROBE_METRIC: max(means)}


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
