"""The logits of a micro-batch never exist as a whole, neither in scoring nor in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.policy import Policy
from megatron_dapo.types import RolloutBatch
from tests.parallel.policy_cases import OBJECTIVES, pack, run_config
from tests.ranks import run_ranks

VOCAB, RESPONSES, LENGTH = 151_936, 8, 256
LOGITS = VOCAB * RESPONSES * LENGTH * 4
"""Bytes of one micro-batch's logits in fp32, 1.2 GB."""
SHARE = 0.15
"""Of them: a block of rows (1/16), and a few copies of the tiny head (1/128 each)."""


def _status_bytes(name: str) -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(name))
    return 1024 * int(line.split()[1])


def _batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.full((RESPONSES,), LENGTH)
    return RolloutBatch(
        tokens=torch.randint(0, VOCAB, (RESPONSES * LENGTH,), generator=generator),
        prompt_tokens=torch.ones(RESPONSES, dtype=torch.int64),
        response_tokens=lengths - 1,
        rollout_logprobs=torch.full((RESPONSES * (LENGTH - 1),), -12.0),
        rewards=torch.zeros(RESPONSES),
        advantages=torch.randn(RESPONSES, generator=generator),
        trained=torch.ones(RESPONSES, dtype=torch.bool),
        group_index=torch.arange(RESPONSES) // 2,
        policy_version=torch.zeros(RESPONSES, dtype=torch.int64),
    )


def _update(rank: int, world: int, objective: str) -> None:
    config = run_config(loss=OBJECTIVES[objective])
    parallel = ParallelContext.create(config.parallel, seed=3)
    model = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    policy = Policy.build(config, model, parallel)
    policy.weights_loaded()
    policy.start_step(1)
    packs = pack(_batch(), config, parallel, 1, tokens=RESPONSES * LENGTH)
    assert [p.num_tokens for p in packs] == [RESPONSES * LENGTH], "one micro-batch is the point"
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    scored, _ = policy.logprobs(packs)
    result = policy.update(scored)
    growth = _status_bytes("VmHWM") - before
    assert not result.skipped and result.grad_norm > 0
    assert growth < SHARE * LOGITS, f"{objective}: {growth / LOGITS:.2f} of the logits' bytes"
    parallel.destroy()


@pytest.mark.parametrize("objective", ["dapo", pytest.param("gspo", marks=pytest.mark.slow)])
def test_an_update_never_holds_the_logits_of_a_micro_batch(objective: str) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's /proc to measure peak memory")
    run_ranks(1, _update, objective)
