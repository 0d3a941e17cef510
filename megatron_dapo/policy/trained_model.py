"""What the policy and its critic share: a sharded model, its optimizer, and one guarded update."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from megatron_dapo import device
from megatron_dapo.config.errors import RunFailed
from megatron_dapo.config.schema import OptimizerConfig, RunConfig
from megatron_dapo.loss.denominators import Ledger
from megatron_dapo.observability.metrics import Metric, MetricBag, mean, total
from megatron_dapo.parallel.collectives import gather_sequence, zigzag_index
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.aux_losses import balance_aux_losses
from megatron_dapo.policy.forward_backward import LossFunction, accumulate_gradients
from megatron_dapo.policy.optimizer import guarded_step, set_lr, warmup_lr
from megatron_dapo.types import MicroBatch

device.install_cpu_support()

from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer.optimizer import ChainedOptimizer  # noqa: E402

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step: this rank's metrics, and what happened, the same on every rank."""

    metrics: MetricBag
    grad_norm: float
    """Before clipping; NaN or infinite when skipped for it, 0 when no token trained."""
    skipped: bool
    """The weights did not move: a non-finite gradient, or no token that trains."""


@dataclass
class SkippedUpdates:
    """Ends a run whose gradients stay non-finite; every rank sees the same and decides alike."""

    stop_after: int
    """`training.stop_after_skipped`"""
    in_a_row: Counter[str] = field(default_factory=Counter)
    """By the model that was not updated."""

    def note(
        self, model: str, result: UpdateResult, dump: Callable[[], object] = lambda: "no folder"
    ) -> None:
        """Count one update of `model`.

        Args:
            dump: writes the update down before the run ends; returns where.

        Raises:
            RuntimeError: it is the last of `stop_after` in a row that were skipped for their norm.
        """
        broken = result.skipped and not math.isfinite(result.grad_norm)
        self.in_a_row[model] = self.in_a_row[model] + 1 if broken else 0
        if self.in_a_row[model] >= self.stop_after:
            try:
                told = f"The last one of them is in {dump()}: `megatron-dapo replay` runs it again"
                told += " and says what is not finite"
            except (OSError, RuntimeError) as error:  # torch.save raises either on a full disk
                told = f"The last one of them could not be written: {error}"
            raise RunFailed(
                f"{self.in_a_row[model]} updates of the {model} in a row had a gradient norm of "
                f"{result.grad_norm} (training.stop_after_skipped={self.stop_after}); the weights "
                f"are those of the last finite update. {told}"
            )


@dataclass(kw_only=True)
class TrainedModel(ABC):
    """A model's shard on this rank, with its optimizer. All methods are collective."""

    name: ClassVar[str]
    """Prefix of its metrics: <name>/lr, <name>/grad_norm, <name>/skipped_steps."""
    config: RunConfig
    parallel: ParallelContext
    settings: OptimizerConfig
    chunks: list[GPTModel]
    wrapped: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    lr: float = 0.0
    updates: int = 0
    """Optimizer steps in this process, also those that were skipped."""

    @abstractmethod
    def update(self, micro_batches: Sequence[MicroBatch]) -> UpdateResult:
        """One optimizer step over all micro-batches of one update of all data ranks.

        Every rank calls it with its data rank's whole packs, equally many and equally long on
        every data rank.
        """

    def start_step(self, step: int) -> None:
        """Set the learning rate of rollout step `step` (from 1), for all its updates. Local."""
        self.lr = warmup_lr(step, self.settings)
        set_lr(self.optimizer, self.lr)

    def _step(
        self,
        local: Sequence[MicroBatch],
        ledger: Ledger,
        loss_function: LossFunction[dict[str, Metric]],
    ) -> UpdateResult:
        """Gradients of `loss_function` over `local_micro_batches`, and one guarded step."""
        bag = MetricBag()
        if ledger.empty:
            logger.warning("no token of this update trains: %s is not updated", self.name)
            return self._result(bag, grad_norm=0.0, skipped=True)
        balance_aux_losses(self.chunks, local, ledger, self.config.moe, self.parallel)
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for metrics in accumulate_gradients(self.wrapped, local, loss_function, self.parallel):
            if self._reports:
                bag.update(metrics)
        self.updates += 1
        outcome = guarded_step(self.optimizer, clip_grad=self.settings.clip_grad)
        if outcome.skipped:
            logger.warning("gradient norm %s: %s is not updated", outcome.grad_norm, self.name)
        return self._result(bag, outcome.grad_norm, outcome.skipped)

    @property
    def _reports(self) -> bool:
        """True on the ranks whose token metrics count: one tensor rank of the last stage."""
        return self.parallel.is_last_stage and self.parallel.tp_rank == 0

    def _result(self, bag: MetricBag, grad_norm: float, skipped: bool) -> UpdateResult:
        if self.parallel.rank == 0:
            bag.add(f"{self.name}/lr", mean(self.lr, 1))
            bag.add(f"{self.name}/skipped_steps", total(float(skipped)))
            if not skipped:
                bag.add(f"{self.name}/grad_norm", mean(grad_norm, 1))
        return UpdateResult(bag, grad_norm, skipped)

    def _whole_pack(self, values: Tensor, micro_batch: MicroBatch) -> Tensor:
        """[tokens / cp] of each context rank -> [tokens] in the order of the pack."""
        size = self.parallel.cp_size
        if size == 1:
            return values
        index = zigzag_index(micro_batch.cu_seqlens, size).flatten().to(values.device)
        return torch.empty_like(index, dtype=values.dtype).index_copy_(
            0, index, gather_sequence(values, self.parallel.cp_group)
        )
