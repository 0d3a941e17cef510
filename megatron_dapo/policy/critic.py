"""The critic of PPO: values of tokens, and their updates; the policy's model with another head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_dapo import device
from megatron_dapo.batch.critic_advantages import critic_advantages
from megatron_dapo.config.schema import LossConfig, RunConfig
from megatron_dapo.loss.denominators import Ledger
from megatron_dapo.loss.policy_loss import LossTerms
from megatron_dapo.loss.value_loss import VALUE_METRICS, value_loss
from megatron_dapo.observability.metrics import Kind
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.forward_backward import local_micro_batches, visit_outputs
from megatron_dapo.policy.model import build_chunks
from megatron_dapo.policy.optimizer import build_optimizer, wrap_chunks
from megatron_dapo.policy.trained_model import TrainedModel, UpdateResult
from megatron_dapo.policy.value_head import ValueModel
from megatron_dapo.types import MicroBatch

device.install_cpu_support()

from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402

CRITIC_METRICS: Mapping[str, Kind] = {
    **VALUE_METRICS,
    "critic/grad_norm": "mean",
    "critic/lr": "mean",
    "critic/skipped_steps": "sum",
}
"""Everything that `update` may put into a bag, each observation on exactly one rank."""
TOKEN_MEAN = LossConfig(aggregation="token_mean")
"""The value loss is a mean over counted tokens, however the policy's loss is divided."""


@dataclass(kw_only=True)
class Critic(TrainedModel):
    """The critic's shard on this rank, cut like the policy. All methods are collective."""

    name = "critic"

    @classmethod
    def build(
        cls, config: RunConfig, hf_config: PretrainedConfig, parallel: ParallelContext
    ) -> Self:
        """A critic with fresh weights; then `start_from` the policy, or load a checkpoint."""
        settings = config.optimizer.model_copy(update={"lr": config.critic.lr})
        chunks = build_chunks(config, hf_config, parallel, ValueModel)
        wrapped = wrap_chunks(chunks, config)
        return cls(
            config=config,
            parallel=parallel,
            settings=settings,
            chunks=chunks,
            wrapped=wrapped,
            optimizer=build_optimizer(wrapped, config, settings),
        )

    @torch.no_grad()
    def start_from(self, policy: Sequence[GPTModel]) -> None:
        """Take the weights that the policy's chunks hold now; the head becomes 0. Local."""
        for own, other in zip(self.chunks, policy, strict=True):
            weights = dict(other.named_parameters())
            for name, parameter in own.named_parameters():
                if name.startswith("output_layer."):
                    parameter.zero_()
                else:
                    parameter.copy_(weights[name])
        self.optimizer.reload_model_params()

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Values under the weights of now, before each label is seen.

        Every rank calls it with its data rank's whole packs. On the last stage the returned
        micro-batches have `values`, [tokens] fp32 on CPU; other stages return them unchanged.
        """

        def visit(output: Tensor, micro_batch: MicroBatch) -> Tensor:
            return self._whole_pack(output[:, 0], micro_batch).cpu()

        local = local_micro_batches(micro_batches, self.parallel)
        values = visit_outputs(self.wrapped, local, visit, self.parallel)
        if not self.parallel.is_last_stage:
            return list(micro_batches)
        pairs = zip(micro_batches, values, strict=True)
        return [micro_batch.replace(values=own) for micro_batch, own in pairs]

    def advantages(self, updates: Sequence[Sequence[MicroBatch]]) -> list[list[MicroBatch]]:
        """All micro-batches of a rollout step with the `advantages` and `returns` of `values`.

        Every rank calls it with its data rank's whole packs. The last stage's ranks of the
        dp_group exchange 3 numbers; other stages return the micro-batches unchanged.
        """
        if not self.parallel.is_last_stage:
            return [list(update) for update in updates]
        return critic_advantages(
            updates,
            gamma=self.config.advantage.gamma,
            lam=self.config.advantage.lam,
            dp_group=self.parallel.dp_group,
        )

    def update(self, micro_batches: Sequence[MicroBatch]) -> UpdateResult:
        """One step on the clipped value loss; the last stage needs `values` and `returns`."""
        local = local_micro_batches(micro_batches, self.parallel)
        ledger = Ledger.from_micro_batches(local, TOKEN_MEAN, dp_cp_group=self.parallel.dp_cp_group)

        def loss(output: Tensor, micro_batch: MicroBatch) -> LossTerms:
            if micro_batch.values is None or micro_batch.returns is None:
                raise RuntimeError(
                    "update: a micro-batch has no values or returns; call values and advantages"
                )
            return value_loss(
                output[:, 0],
                micro_batch.values,
                micro_batch.returns,
                micro_batch.loss_mask,
                clip_width=self.config.critic.clip_width,
                token_weights=ledger.token_weights(micro_batch),
                denominator=ledger.denominator(micro_batch),
            )

        return self._step(local, ledger, loss)
