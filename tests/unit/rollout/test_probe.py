"""The probe: what is asked of engines, and the trainer's verdict on one rank.

tests/parallel/test_probe.py does the same on several ranks.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from megatron_dapo.batch.packing import pack_update
from megatron_dapo.config import RunConfig
from megatron_dapo.rollout.engine import EngineError
from megatron_dapo.rollout.probe import (
    LONGEST_PROMPT,
    PROBE_METRIC,
    Probe,
    check_probes,
    probe_batch,
    probe_engine,
    probe_tolerance,
)
from megatron_dapo.types import MicroBatch
from tests.unit.config.runs import make_config
from tests.unit.conftest import Alone
from tests.unit.rollout.fake_engine import FakeEngine

if TYPE_CHECKING:
    from megatron_dapo.parallel.context import ParallelContext

FIRST = Probe(0, (5, 6, 7), (8, 9), (-1.0, -2.0), 4)
SECOND = Probe(1, (5, 6, 7), (8, 9, 10, 11), (-0.5, -0.5, -0.5, -0.5), 4)


class Answering(FakeEngine):
    """Answers with exactly as many tokens as were asked for."""

    async def generate(self, request):
        result = await super().generate(request)
        tokens = tuple(range(10, 10 + request.max_tokens))
        return replace(result, token_ids=tokens, logprobs=(-0.5,) * len(tokens))


def ask(engine: FakeEngine, config: RunConfig, prompt: tuple[int, ...] = (5, 6)) -> Probe:
    return asyncio.run(probe_engine(engine.generate, prompt, config, number=1))


def test_a_probe_samples_the_rollouts_own_distribution_and_never_stops_early() -> None:
    engine = Answering(version=7)
    config = make_config(rollout={"temperature": 0.7}, resharding={"probe_tokens": 5})
    probe = ask(engine, config, tuple(range(1, 500)))
    (request,) = engine.requests
    assert request.prompt_token_ids == tuple(range(1, LONGEST_PROMPT + 1))
    assert (request.temperature, request.top_p, request.top_k) == (0.7, 1.0, -1)
    assert (request.max_tokens, request.stop_token_ids) == (5, ())
    assert probe == Probe(1, request.prompt_token_ids, tuple(range(10, 15)), (-0.5,) * 5, 7)


def test_a_probe_is_no_longer_than_a_response() -> None:
    config = make_config(resharding={"probe_tokens": 500})
    assert len(ask(Answering(), config).response_token_ids) == config.rollout.max_response_tokens


def test_engines_are_probed_with_seeds_of_their_own_that_later_updates_keep() -> None:
    engine, config = Answering(), make_config()
    for number in (0, 1, 0):
        asyncio.run(probe_engine(engine.generate, (5,), config, number=number))
    first, second, again = (request.seed for request in engine.requests)
    assert first == again != second


def test_a_probe_that_is_cut_short_is_an_error() -> None:
    with pytest.raises(EngineError, match="engine 1 answered a probe of 16 tokens with"):
        ask(FakeEngine(), make_config())


def test_the_batch_has_a_row_for_each_engine() -> None:
    batch = probe_batch([FIRST, replace(SECOND, engine=3)])
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 10, 11]
    assert batch.prompt_tokens.tolist() == [3, 3]
    assert batch.response_tokens.tolist() == [2, 4]
    assert batch.rollout_logprobs.tolist() == [-1.0, -2.0, -0.5, -0.5, -0.5, -0.5]
    assert batch.group_index.tolist() == [0, 3]
    assert batch.policy_version.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("model", "engine", "more", "allowed"),
    [
        ("float32", "auto", {}, 1e-3),
        ("float32", "float32", {}, 1e-3),
        ("float32", "bfloat16", {}, 0.1),
        ("bfloat16", "auto", {}, 0.1),
        ("bfloat16", "float32", {}, 0.1),
        ("float32", "auto", {"engine_quantization": "fp8"}, 0.1),
    ],
)
def test_rounding_decides_what_is_allowed(
    model: str, engine: str, more: dict[str, object], allowed: float
) -> None:
    rollout = {"engine_dtype": engine, **more}
    assert probe_tolerance(make_config(model={"dtype": model}, rollout=rollout)) == allowed
    mine = make_config(
        model={"dtype": model}, rollout=rollout, resharding={"probe_tolerance": 0.25}
    )
    assert probe_tolerance(mine) == 0.25


@pytest.fixture
def parallel(alone: Alone) -> ParallelContext:
    return cast("ParallelContext", alone)


def scored(probes: list[Probe], *gaps: float) -> list[MicroBatch]:
    """Packs whose trainer log-probs differ by the gap of each probe, up and down in turn."""
    batch = probe_batch(probes)
    packs = pack_update(
        batch,
        torch.arange(len(probes)),
        dp_rank=0,
        dp_size=1,
        tokens_per_micro_batch=8,
        pad_multiple=1,
    )
    assert len(packs) == len(probes)
    filled = []
    for pack in packs:
        signs = 1.0 - 2.0 * (torch.arange(pack.num_tokens) % 2)
        gap = torch.tensor(gaps)[pack.rows[pack.sequence_index]]
        old = torch.where(pack.loss_mask, pack.rollout_logprobs + signs * gap, 99.0)
        filled.append(pack.replace(old_logprobs=old))
    return filled


def test_the_worst_engine_is_the_metric(parallel: ParallelContext) -> None:
    config = make_config(resharding={"probe_tolerance": 0.2})
    probes = [FIRST, SECOND]
    found = check_probes(probe_batch(probes), scored(probes, 0.05, 0.125), config, parallel)
    assert found == {PROBE_METRIC: pytest.approx(0.125)}


def test_an_engine_that_computes_something_else_stops_the_run(parallel: ParallelContext) -> None:
    config = make_config(resharding={"probe_tolerance": 0.1})
    probes = [FIRST, SECOND]
    message = r"rollout engine 1 at policy version 4: .* by 0\.125 nats .* allowed are 0\.1 "
    with pytest.raises(RuntimeError, match=message):
        check_probes(probe_batch(probes), scored(probes, 0.05, 0.125), config, parallel)


def test_log_probs_that_are_no_numbers_stop_the_run(parallel: ParallelContext) -> None:
    with pytest.raises(RuntimeError, match=r"engine 0 .* by nan nats"):
        check_probes(probe_batch([FIRST]), scored([FIRST], math.nan), make_config(), parallel)
