"""Groups of text and ids -> the flat tensors of one rollout step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from megatron_dapo.batch.advantages import group_advantages
from megatron_dapo.config.schema import AdvantageConfig, RunConfig
from megatron_dapo.types import Group, RolloutBatch


def build_rollout_batch(groups: Sequence[Group], config: RunConfig) -> RolloutBatch:
    """All responses of `groups`, in order, with their shaped rewards and the advantages of those.

    Groups are told apart by their place in `groups`, never by prompt text or id: the same prompt
    sampled twice makes two groups. Token ids and log-probs are the engine's, untouched.
    A response that was not graded has no part in its group's statistics and does not train. With
    `reward.filter_truncated`, one that hit the length limit counts in them and does not train.

    Raises:
        RuntimeError: no groups, or a prompt without tokens (nothing would predict the first
            response token).
    """
    if not groups:
        raise RuntimeError("no groups: a rollout step needs at least one group to train on")
    pairs = [(group.prompt, response) for group in groups for response in group.responses]
    rewards = [reward for group in groups for reward in group.rewards]
    empty = [prompt.id for prompt, _ in pairs if not prompt.token_ids]
    if empty:
        raise RuntimeError(
            f"prompt {empty[0]} has no tokens; the first response token needs one before it"
        )
    group_index = torch.repeat_interleave(
        torch.arange(len(groups)), torch.tensor([len(group.responses) for group in groups])
    )
    graded = torch.tensor([reward.accuracy is not None for reward in rewards])
    truncated = torch.tensor([response.finish_reason == "length" for _, response in pairs])
    shaped = torch.tensor([reward.shaped for reward in rewards], dtype=torch.float64)
    sequences = chain.from_iterable(
        (prompt.token_ids, answer.token_ids) for prompt, answer in pairs
    )
    return RolloutBatch(
        tokens=_flat(sequences, torch.int64),
        prompt_tokens=torch.tensor([len(prompt.token_ids) for prompt, _ in pairs]),
        response_tokens=torch.tensor([len(response.token_ids) for _, response in pairs]),
        rollout_logprobs=_flat((answer.rollout_logprobs for _, answer in pairs), torch.float32),
        rewards=shaped.to(torch.float32),
        advantages=_advantages(shaped, group_index, graded, config.advantage),
        trained=graded & ~truncated if config.reward.filter_truncated else graded,
        group_index=group_index,
        policy_version=torch.tensor([response.policy_version for _, response in pairs]),
    )


def _advantages(
    rewards: Tensor, group_index: Tensor, graded: Tensor, config: AdvantageConfig
) -> Tensor:
    """[responses] fp32: of the groups, or 0 where a critic will give one to each token."""
    if config.estimator == "gae":
        return torch.zeros_like(rewards, dtype=torch.float32)
    return group_advantages(
        rewards,
        group_index,
        valid=graded,
        normalize_std=config.normalize_std,
        unbiased=config.unbiased,
        eps=config.eps,
    )


def _flat(rows: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)


_DTYPES = {
    "rollout_logprobs": torch.float32,
    "rewards": torch.float32,
    "advantages": torch.float32,
    "trained": torch.bool,
}


def from_tensors(tensors: Mapping[str, Tensor]) -> RolloutBatch:
    """The batch whose `RolloutBatch.tensors()` were sent to this rank.

    Raises:
        RuntimeError: a tensor is missing, unknown, of another dtype or of another length than
            the others say.
    """
    names = [field.name for field in dataclasses.fields(RolloutBatch)]
    if sorted(tensors) != sorted(names):
        raise RuntimeError(f"rollout batch came with {sorted(tensors)}, expected {sorted(names)}")
    batch = RolloutBatch(**tensors)
    responses = batch.num_responses
    response_total = int(batch.response_tokens.sum())
    lengths = dict.fromkeys(names, responses) | {
        "tokens": int(batch.prompt_tokens.sum()) + response_total,
        "rollout_logprobs": response_total,
    }
    for name in names:
        dtype = _DTYPES.get(name, torch.int64)
        if tensors[name].dtype != dtype or tensors[name].shape != (lengths[name],):
            raise RuntimeError(
                f"rollout batch: {name} is {tensors[name].dtype} {tuple(tensors[name].shape)}, "
                f"expected {dtype} ({lengths[name]},)"
            )
    return batch
