"""An update whose gradient is not finite, written so that it can be run again.

    run_dir/dumps/step_00000042/rank_3.pt      one file a rank: its packs, its shard, random states
    run_dir/dumps/step_00000042/config.resolved.yaml

Only plain tensors and numbers: reading one runs no code of whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dapo import device
from megatron_dapo.config.load import save_resolved
from megatron_dapo.policy.trained_model import TrainedModel, UpdateResult
from megatron_dapo.types import MicroBatch

device.install_cpu_support()

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402

DUMPS = "dumps"


@dataclass(frozen=True)
class FailedUpdate:
    """What one rank held when an update failed."""

    step: int
    model: str
    """Name of the model that was not updated: actor or critic."""
    lr: float
    micro_batches: list[MicroBatch]
    weights: list[dict[str, Tensor]]
    """Of each chunk of this rank, by parameter."""
    random: dict[str, Any]

    def restore(self, model: TrainedModel) -> None:
        """Give `model`, built in the same layout, this rank's weights and random states. Local."""
        with torch.no_grad():
            for chunk, saved in zip(model.chunks, self.weights, strict=True):
                own = dict(chunk.named_parameters())
                if own.keys() != saved.keys():
                    raise ValueError(
                        f"the dump of step {self.step} holds other parameters than this rank: "
                        f"{sorted(own.keys() ^ saved.keys())[:3]}. Replay it with its own "
                        "config.resolved.yaml and as many ranks"
                    )
                for name, parameter in own.items():
                    parameter.copy_(saved[name])
        model.optimizer.reload_model_params()
        model.lr = self.lr
        torch.set_rng_state(self.random["cpu"])
        get_cuda_rng_tracker().set_states(self.random["tracker"])


def dump_folder(run_dir: Path, step: int) -> Path:
    """Where a failed update of `step` lies."""
    return run_dir / DUMPS / f"step_{step:08d}"


def write_failed_update(model: TrainedModel, update: Sequence[MicroBatch], step: int) -> Path:
    """Write this rank's file of a failed update of `model`, whose weights have not moved.

    Every rank calls it; nothing is communicated. Returns the folder, which all ranks share.
    """
    folder = dump_folder(model.config.run_dir, step)
    folder.mkdir(parents=True, exist_ok=True)
    if model.parallel.rank == 0:
        save_resolved(model.config, folder)
    document = {
        "step": step,
        "model": model.name,
        "lr": model.lr,
        "micro_batches": [_fields(micro_batch) for micro_batch in update],
        "weights": [
            {name: p.detach().cpu() for name, p in chunk.named_parameters()}
            for chunk in model.chunks
        ],
        "random": {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()},
    }
    torch.save(document, rank_file(folder, model.parallel.rank))
    return folder


def read_failed_update(folder: Path, rank: int) -> FailedUpdate:
    """One rank's file.

    Raises:
        ValueError: there is none of this rank.
    """
    file = rank_file(folder, rank)
    if not file.exists():
        found = len(list(folder.glob("rank_*.pt")))
        raise ValueError(
            f"{folder} holds files of {found} ranks, none of rank {rank}: give a folder "
            f"RUN_DIR/{DUMPS}/step_N that a run wrote when it stopped, and start as many ranks"
        )
    document = torch.load(file, weights_only=True, map_location="cpu")
    document["micro_batches"] = [MicroBatch(**each) for each in document["micro_batches"]]
    return FailedUpdate(**document)


def rank_file(folder: Path, rank: int) -> Path:
    """One rank's part of a dump."""
    return folder / f"rank_{rank}.pt"


def replay(failed: FailedUpdate, model: TrainedModel) -> tuple[UpdateResult, list[str]]:
    """Run the update again, from the same weights; the result and what is not finite on this rank.

    Collective: every rank calls it with its own file.
    """
    failed.restore(model)
    result = model.update(failed.micro_batches)
    inputs = [
        f"micro-batch {number}: {bad} of {value.numel()} numbers of {name}"
        for number, micro_batch in enumerate(failed.micro_batches)
        for name, value in _fields(micro_batch).items()
        if isinstance(value, Tensor) and (bad := int((~torch.isfinite(value)).sum()))
    ]
    gradients = [
        f"gradient of {name}"
        for chunk in model.chunks
        for name, parameter in chunk.named_parameters()
        if not torch.isfinite(parameter.main_grad).all()  # type: ignore[attr-defined]
    ]
    return result, inputs + gradients


def _fields(micro_batch: MicroBatch) -> dict[str, Tensor | int | None]:
    values = {field.name: getattr(micro_batch, field.name) for field in fields(micro_batch)}
    return {name: v.cpu() if isinstance(v, Tensor) else v for name, v in values.items()}
