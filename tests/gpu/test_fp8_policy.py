"""FP8 layers really run, and stay close to BF16."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo import device
from megatron_dapo.batch.packing import pack_update, pad_multiple
from megatron_dapo.config.schema import PrecisionConfig, RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.parallel.launch_env import LaunchEnv, init_process_group
from megatron_dapo.policy.policy import Policy
from megatron_dapo.resharding.load import load_hf_weights
from tests.parallel.policy_cases import drift, rollout_batch, run_config
from tests.tiny_models import save_tiny_model

RECIPES = ("blockwise", "tensorwise", "delayed")
MEAN_GAP = 0.3
"""FP8 rounds each matrix product by about 4 %."""


@pytest.fixture(scope="module")
def parallel() -> Iterator[ParallelContext]:
    if not device.has_fp8():
        pytest.skip("needs Transformer Engine on a device with FP8")
    device.select("cuda", local_rank=0)
    env = LaunchEnv(0, 1, 0, "127.0.0.1", None)
    init_process_group(env, timeout=timedelta(seconds=120), backend=device.backend())
    context = ParallelContext.create(run_config().parallel, seed=3)
    yield context
    context.destroy()
    dist.destroy_process_group()


def score_and_update(config: RunConfig, folder: Path, parallel: ParallelContext) -> Tensor:
    """Old log-probs of all trained tokens; one update must follow from them."""
    hf = save_tiny_model(folder, "qwen3")
    policy = Policy.build(config, hf.config, parallel)
    load_hf_weights(policy.chunks, hf.config, folder, parallel)
    policy.weights_loaded()
    policy.start_step(1)
    batch = rollout_batch(hf.config.vocab_size)
    packs = pack_update(
        batch,
        torch.arange(batch.num_responses),
        dp_rank=0,
        dp_size=1,
        tokens_per_micro_batch=256,
        pad_multiple=pad_multiple(1, 1, False, "blockwise"),
    )
    scored, _ = policy.logprobs(packs)
    assert not policy.update([drift(micro_batch) for micro_batch in scored]).skipped
    return torch.cat([m.old_logprobs[m.loss_mask] for m in scored if m.old_logprobs is not None])


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_is_near_bf16_but_not_bf16(
    recipe: str, parallel: ParallelContext, tmp_path: Path
) -> None:
    bf16 = run_config(dtype="bfloat16")
    fp8 = bf16.model_copy(update={"precision": PrecisionConfig.model_validate({"fp8": recipe})})
    gap = score_and_update(fp8, tmp_path, parallel) - score_and_update(bf16, tmp_path, parallel)
    assert 0 < gap.abs().mean() < MEAN_GAP
