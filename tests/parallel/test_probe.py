"""The trainer's verdict on probes is the same in every layout, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from transformers import PreTrainedModel

from megatron_dapo.batch.rollout_batch import from_tensors
from megatron_dapo.parallel.collectives import broadcast_tensors
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.rollout.probe import PROBE_METRIC, Probe, check_probes, probe_batch
from tests.parallel.leftovers import dissolve
from tests.parallel.policy_cases import (
    build_policy,
    model_of,
    pack,
    reference_logprobs,
    run_config,
)
from tests.ranks import run_ranks

LAYOUTS: dict[int, tuple[Mapping[str, object], ...]] = {
    1: ({},),
    2: (
        {"tensor": 2},
        {"pipeline": 2},
        {"context": 2},
        {"data": 2},
        {"pipeline": 2, "virtual_pipeline": 2},
    ),
    4: ({"pipeline": 2, "context": 2}, {"tensor": 2, "data": 2}),
}
OFF = 0.25
"""Nats by which the second engine of a broken pair errs."""


def probes_of(model: PreTrainedModel, temperature: float, *, off: float) -> Iterator[Probe]:
    """Two engines that compute as transformers does; the second errs by `off`."""
    for engine, length in enumerate((5, 9)):
        tokens = torch.arange(3, 3 + 4 + length) * (7 + engine) % model.config.vocab_size
        with torch.no_grad():
            logprobs = reference_logprobs(model, tokens, temperature)[3:]
        yield Probe(
            engine,
            tuple(tokens[:4].tolist()),
            tuple(tokens[4:].tolist()),
            tuple((logprobs + engine * off).tolist()),
            6,
        )


def _walk(rank: int, world: int) -> None:
    for layout in LAYOUTS[world]:
        config = run_config(**layout)
        parallel = ParallelContext.create(config.parallel, seed=3)
        model = model_of("qwen2_tied")
        policy = build_policy(config, model, parallel)
        for off in (0.0, OFF):
            probes = list(probes_of(model, config.rollout.temperature, off=off))
            mine = probe_batch(probes).tensors() if rank == 0 else None
            batch = from_tensors(broadcast_tensors(mine, group=parallel.control_group))
            packs = pack(batch, config, parallel, config.parallel.pipeline)
            scored, _ = policy.logprobs(packs)
            if off:
                message = r"rollout engine 1 at policy version 6: .* by 0\.25 nats"
                with pytest.raises(RuntimeError, match=message):
                    check_probes(batch, scored, config, parallel)
            else:
                found = check_probes(batch, scored, config, parallel)
                assert 0 < found[PROBE_METRIC] < 1e-5, layout
        dissolve(policy)
        parallel.destroy()


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_rank_of_every_layout_comes_to_the_same_verdict(world: int) -> None:
    run_ranks(world, _walk)
