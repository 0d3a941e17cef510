"""The trained policy: log-probs and updates over the Megatron model of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig

from megatron_dapo.config.schema import RunConfig
from megatron_dapo.loss.denominators import Ledger
from megatron_dapo.loss.linear_head import linear_logprobs
from megatron_dapo.loss.objectives import uses_whole_sequences
from megatron_dapo.loss.policy_cross_entropy import policy_cross_entropy
from megatron_dapo.loss.policy_loss import LOSS_METRICS, LossTerms, policy_loss
from megatron_dapo.observability.metrics import Kind, Metric, MetricBag, maximum, mean
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.forward_backward import local_micro_batches, visit_outputs
from megatron_dapo.policy.model import build_chunks
from megatron_dapo.policy.optimizer import build_optimizer, wrap_chunks
from megatron_dapo.policy.policy_model import PolicyModel, show_head_gradient
from megatron_dapo.policy.reference import FrozenWeights
from megatron_dapo.policy.trained_model import TrainedModel, UpdateResult
from megatron_dapo.types import MicroBatch

POLICY_METRICS: Mapping[str, Kind] = {
    **LOSS_METRICS,
    "actor/grad_norm": "mean",
    "actor/lr": "mean",
    "actor/skipped_steps": "sum",
    "training/rollout_probs_diff_mean": "mean",
    "training/rollout_probs_diff_max": "max",
    "training/rollout_kl": "mean",
}
"""Everything that `logprobs` and `update` may put into a bag. Each observation is in the bag of
exactly one rank, so a reduction over all ranks counts it once."""


class _Head(TypedDict):
    """Arguments that `linear_logprobs` and `policy_cross_entropy` share."""

    weight: Tensor
    tp_group: ProcessGroup
    sequence_parallel: bool
    temperature: float
    real_vocab_size: int
    main_grad: Tensor
    """Megatron's fp32 sum: the head's gradient goes there unrounded, whatever the dtype."""


@dataclass(kw_only=True)
class Policy(TrainedModel):
    """The policy's shard on this rank, with its optimizer. All methods are collective."""

    name = "actor"
    vocab_size: int
    """Real tokens; rows past it pad the vocabulary."""
    reference: FrozenWeights | None = None

    @classmethod
    def build(
        cls, config: RunConfig, hf_config: PretrainedConfig, parallel: ParallelContext
    ) -> Self:
        """A policy with fresh weights on every rank; load real ones, then `weights_loaded`.

        Raises:
            ValueError: the model, the layout or the precision cannot be trained here.
        """
        chunks = build_chunks(config, hf_config, parallel, PolicyModel)
        wrapped = wrap_chunks(chunks, config)
        if config.training.overlap_grad_reduce and parallel.is_last_stage:
            show_head_gradient(chunks[-1].head_weight)
        return cls(
            config=config,
            parallel=parallel,
            settings=config.optimizer,
            vocab_size=hf_config.vocab_size,
            chunks=chunks,
            wrapped=wrapped,
            optimizer=build_optimizer(wrapped, config, config.optimizer),
        )

    def weights_loaded(self) -> None:
        """Call after writing the start weights into `chunks`, before any checkpoint is loaded.

        The optimizer's fp32 masters follow the weights; with loss.kl_coef > 0 a frozen copy of
        them becomes the reference policy. Local.
        """
        self.optimizer.reload_model_params()
        if self.config.loss.kl_coef > 0:
            self.reference = FrozenWeights.of(self.chunks)

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], MetricBag]:
        """Log-probs of the labels under the weights of now, in the trainer's own numerics.

        Every rank calls it with its data rank's whole packs. On the last stage the returned
        micro-batches have `old_logprobs` (and with a reference policy `reference_logprobs`),
        [tokens] fp32 on CPU; other stages return them unchanged.
        """
        local = local_micro_batches(micro_batches, self.parallel)
        fields = {"old_logprobs": self._whole_logprobs(local)}
        if self.reference is not None:
            with self.reference.swapped_in():
                fields["reference_logprobs"] = self._whole_logprobs(local)
        bag = MetricBag()
        if not self.parallel.is_last_stage:
            return list(micro_batches), bag
        scored = [
            micro_batch.replace(**{name: values[index] for name, values in fields.items()})
            for index, micro_batch in enumerate(micro_batches)
        ]
        if self._reports and self.parallel.cp_rank == 0:
            for micro_batch in scored:
                bag.update(_rollout_gap(micro_batch))
        return scored, bag

    def update(self, micro_batches: Sequence[MicroBatch]) -> UpdateResult:
        """One optimizer step over all micro-batches of one update of all data ranks.

        Every rank calls it with its data rank's whole packs; the last stage needs
        `old_logprobs`. Equally many, equally long micro-batches on every data rank.
        """
        local = local_micro_batches(micro_batches, self.parallel)
        ledger = Ledger.from_micro_batches(
            local,
            self.config.loss,
            dp_cp_group=self.parallel.dp_cp_group,
            cp_group=self.parallel.cp_group,
        )

        def loss(hidden: Tensor, micro_batch: MicroBatch) -> LossTerms:
            return self._loss(hidden, micro_batch, ledger)

        return self._step(local, ledger, loss)

    def _loss(self, hidden: Tensor, micro_batch: MicroBatch, ledger: Ledger) -> LossTerms:
        """Loss terms of one micro-batch from its final hidden states, on the last stage.

        A token-level gradient is formed while the token's logits are there. A loss that needs
        whole responses first takes their log-probs, and visits the logits again in backward.
        """
        if micro_batch.old_logprobs is None:
            raise RuntimeError("update: a micro-batch has no old_logprobs; call logprobs first")
        weights, denominator = ledger.token_weights(micro_batch), ledger.denominator(micro_batch)
        if not uses_whole_sequences(self.config.loss):
            terms = policy_cross_entropy(
                hidden,
                targets=micro_batch.labels,
                old_logprobs=micro_batch.old_logprobs,
                advantages=micro_batch.advantages,
                loss_mask=micro_batch.loss_mask,
                config=self.config.loss,
                rollout_logprobs=micro_batch.rollout_logprobs,
                reference_logprobs=micro_batch.reference_logprobs,
                token_weights=weights,
                denominator=denominator,
                incoming_scale=self._incoming_scale(hidden.device),
                **self._head,
            )
            return LossTerms(terms.loss_sum, denominator, terms.metrics)
        logprobs, entropy = linear_logprobs(hidden, targets=micro_batch.labels, **self._head)
        return policy_loss(
            logprobs,
            micro_batch.old_logprobs,
            micro_batch.advantages,
            micro_batch.loss_mask,
            micro_batch.sequence_index,
            num_sequences=micro_batch.num_sequences,
            config=self.config.loss,
            group_index=micro_batch.group_index,
            rollout_logprobs=micro_batch.rollout_logprobs,
            reference_logprobs=micro_batch.reference_logprobs,
            entropy=entropy,
            cp_group=self.parallel.cp_group,
            token_weights=weights,
            denominator=denominator,
        )

    def _incoming_scale(self, where: torch.device) -> Tensor:
        """The gradient that Megatron's schedule sends into loss_sum, scalar: its loss scale.

        With `calculate_per_token_loss` and three outputs it divides by nothing else before
        backward; without a loss scale that leaves 1.
        """
        one, scale = torch.ones((), device=where), self.chunks[-1].config.grad_scale_func
        return one if scale is None else scale(one)

    @property
    def _head(self) -> _Head:
        """The last chunk's head, as the loss multiplies by it. Local, on the last stage."""
        chunk = self.chunks[-1]
        return _Head(
            weight=chunk.head_weight,
            tp_group=self.parallel.tp_group,
            sequence_parallel=chunk.config.sequence_parallel,
            temperature=self.config.rollout.temperature,
            real_vocab_size=self.vocab_size,
            main_grad=chunk.head_weight.main_grad,
        )

    def _whole_logprobs(self, local: Sequence[MicroBatch]) -> list[Tensor]:
        """[tokens] fp32 CPU log-probs of each whole pack, on the last stage; [] elsewhere."""

        def visit(hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
            logprobs, _ = linear_logprobs(
                hidden, targets=micro_batch.labels, with_entropy=False, **self._head
            )
            return self._whole_pack(logprobs, micro_batch).cpu()

        return visit_outputs(self.wrapped, local, visit, self.parallel)


def _rollout_gap(micro_batch: MicroBatch) -> dict[str, Metric]:
    """How far the engine's probabilities of the trained tokens are from the trainer's."""
    assert micro_batch.old_logprobs is not None, "logprobs sets it before"
    mask = micro_batch.loss_mask
    count = int(mask.sum())
    if count == 0:
        return {}
    trainer = micro_batch.old_logprobs[mask].double()
    engine = micro_batch.rollout_logprobs[mask].double()
    gap = (trainer.exp() - engine.exp()).abs()
    return {
        "training/rollout_probs_diff_mean": mean(gap.sum(), count),
        "training/rollout_probs_diff_max": maximum(gap.max()),
        "training/rollout_kl": mean((engine - trainer).sum(), count),
    }
