"""The policy on one CUDA device: BF16 against transformers, fused layers against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from megatron_dapo import device
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.parallel.launch_env import LaunchEnv, init_process_group
from megatron_dapo.policy import model as policy_model
from megatron_dapo.policy.policy import Policy
from megatron_dapo.resharding.load import load_hf_weights
from tests.parallel.policy_cases import (
    drift,
    pack,
    reference_logprobs,
    rollout_batch,
    run_config,
    sequences,
)
from tests.tiny_models import save_tiny_model

FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
PROVIDERS = ("local", "te")
MEAN_GAP = 0.05
"""BF16 rounds logits of this size by about 0.02."""


@pytest.fixture(scope="module")
def parallel() -> Iterator[ParallelContext]:
    device.select("cuda", local_rank=0)
    env = LaunchEnv(0, 1, 0, "127.0.0.1", None)
    init_process_group(env, timeout=timedelta(seconds=120), backend=device.backend())
    context = ParallelContext.create(run_config().parallel, seed=3)
    yield context
    context.destroy()
    dist.destroy_process_group()


def loaded_policy(
    config: RunConfig, folder: Path, hf: PreTrainedModel, parallel: ParallelContext
) -> Policy:
    policy = Policy.build(config, hf.config, parallel)
    load_hf_weights(policy.chunks, hf.config, folder, parallel)
    policy.weights_loaded()
    policy.start_step(1)
    return policy


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_policy_scores_like_transformers_and_updates(
    family: str,
    provider: str,
    parallel: ParallelContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if provider == "te" and not device.has_transformer_engine():
        pytest.skip("needs Transformer Engine")
    monkeypatch.setattr(policy_model, "layer_provider", lambda: provider)
    hf = save_tiny_model(tmp_path, family)
    config = run_config(dtype="bfloat16")
    policy = loaded_policy(config, tmp_path, hf, parallel)
    batch = rollout_batch(hf.config.vocab_size)
    scored, _ = policy.logprobs(pack(batch, config, parallel, 2))
    rows = list(sequences(batch))
    gaps = []
    for micro_batch in scored:
        assert micro_batch.old_logprobs is not None
        for number, row in enumerate(micro_batch.rows.tolist()):
            with torch.no_grad():
                expected = reference_logprobs(hf, rows[row][0], config.rollout.temperature)
            start = int(micro_batch.cu_seqlens[number])
            gaps.append(micro_batch.old_logprobs[start : start + expected.numel()] - expected)
    assert torch.cat(gaps).abs().mean() < MEAN_GAP
    result = policy.update([drift(micro_batch) for micro_batch in scored])
    assert not result.skipped and result.grad_norm > 0
