"""Groups and rollout batches with telling, made-up content."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_dapo.config.schema import DataConfig, ModelConfig, RunConfig
from megatron_dapo.types import FinishReason, Group, Prompt, Response, Reward, RolloutBatch


def run_config(**sections: object) -> RunConfig:
    base = {
        "run_dir": Path("run"),
        "model": ModelConfig(path=Path("model")),
        "data": DataConfig(train=Path("train.jsonl")),
    }
    return RunConfig(**base | sections)  # type: ignore[arg-type]


def make_group(
    prompt_ids: Sequence[int],
    answers: Sequence[Sequence[int]],
    rewards: Sequence[Reward],
    *,
    finish: Sequence[FinishReason] | None = None,
    prompt_id: str = "p",
) -> Group:
    responses = tuple(
        Response(
            prompt_id=prompt_id,
            sample_index=i,
            token_ids=tuple(ids),
            rollout_logprobs=tuple(-token / 100 for token in ids),
            finish_reason=finish[i] if finish else "stop",
            policy_version=i,
            seed=i,
        )
        for i, ids in enumerate(answers)
    )
    return Group(Prompt(prompt_id, "text", tuple(prompt_ids), "1"), responses, tuple(rewards))


def random_batch(
    lengths: Sequence[tuple[int, int]], *, group_size: int = 1, seed: int = 0
) -> RolloutBatch:
    """A batch whose every token id, log-prob and advantage occurs once."""
    rng = random.Random(seed)
    prompts = torch.tensor([prompt for prompt, _ in lengths], dtype=torch.int64)
    responses = torch.tensor([response for _, response in lengths], dtype=torch.int64)
    total, answers = int((prompts + responses).sum()), int(responses.sum())
    return RolloutBatch(
        tokens=torch.arange(1, total + 1),
        prompt_tokens=prompts,
        response_tokens=responses,
        rollout_logprobs=-torch.arange(1, answers + 1, dtype=torch.float32) / 64,
        rewards=torch.arange(1, len(lengths) + 1, dtype=torch.float32) / 4,
        advantages=torch.arange(1, len(lengths) + 1, dtype=torch.float32) / 8,
        trained=torch.tensor([rng.random() < 0.8 for _ in lengths], dtype=torch.bool),
        group_index=torch.arange(len(lengths)) // group_size,
        policy_version=torch.zeros(len(lengths), dtype=torch.int64),
    )
