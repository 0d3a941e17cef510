"""Save in one layout, resume in another: the next updates are those of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dapo.checkpoint import save as checkpoint_save
from megatron_dapo.checkpoint import state as checkpoint_state
from megatron_dapo.checkpoint.commit import TENSORS, newest_complete, step_folder
from megatron_dapo.checkpoint.save import CheckpointError
from megatron_dapo.checkpoint.state import Restored, load_checkpoint, save_checkpoint
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.policy import Policy
from megatron_dapo.resharding.transfer import export_stream
from megatron_dapo.types import MicroBatch
from tests.parallel.policy_cases import build_policy, drift, pack, rollout_batch, run_config
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

VOCAB = 600  # padded to 640 rows on one tensor rank and to 768 on two
BEFORE = AFTER = 2
Layout = Mapping[str, object]


@dataclass(frozen=True)
class Case:
    family: str
    saved_by: Layout
    loaded_by: Layout
    dtype: str = "float32"

    @property
    def tolerance(self) -> float:
        """Other layouts sum in another order; bf16 rounds each of those sums."""
        if self.saved_by == self.loaded_by:
            return 0.0
        return 1e-5 if self.dtype == "float32" else 2e-2


PLAIN = {"distributed_optimizer": False}
TWO_RANKS = (
    Case("qwen3", {"tensor": 2} | PLAIN, {"pipeline": 2} | PLAIN),
    Case("qwen2_tied", {"data": 2}, {"tensor": 2}),
    Case("qwen2_tied", {"pipeline": 2, "virtual_pipeline": 2}, {"data": 2}),
    Case("qwen3", {"data": 2}, {"data": 2}),
    Case("qwen3", {"data": 2}, {"tensor": 2}, dtype="bfloat16"),
    Case("qwen3_moe", {"data": 2, "expert": 2}, {"data": 2, "expert": 2}),
    Case("qwen3_moe", {"tensor": 2, "expert": 2}, {"data": 2, "expert": 2}),
    Case("qwen3_moe", {"data": 2}, {"pipeline": 2}),
)


def _policy(case: Case, layout: Layout, *, seed: int) -> Policy:
    config = run_config(dtype=case.dtype, **layout)
    parallel = ParallelContext.create(config.parallel, seed=seed)
    return build_policy(config, _model(case.family, seed), parallel)


def _model(family: str, seed: int):  # type: ignore[no-untyped-def]
    return tiny_model(family, seed=seed, hidden_size=64, intermediate_size=96, vocab_size=VOCAB)


def _updates(policy: Policy, first: int, count: int) -> list[float]:
    norms = []
    for step in range(first, first + count):
        policy.start_step(step)
        micro_batches = pack(rollout_batch(VOCAB), policy.config, policy.parallel, 4)
        scored, _ = policy.logprobs(micro_batches)
        if policy.parallel.is_last_stage:
            scored = [drift(micro_batch) for micro_batch in scored]
        norms.append(policy.update(scored).grad_norm)
    return norms


def _weights(policy: Policy, family: str) -> dict[str, Tensor]:
    stream = export_stream(policy.chunks, _model(family, 0).config, policy.parallel)
    return {name: tensor.clone() for name, tensor in stream}


def _save(policy: Policy, folder: Path, step: int, keep: int = 2) -> Path:
    return save_checkpoint(
        folder,
        step,
        chunks=policy.chunks,
        optimizer=policy.optimizer,
        state={"prompts": {"epoch": 1, "position": 17}, "policy_version": 5},
        parallel=policy.parallel,
        keep=keep,
    )


def _load(policy: Policy, checkpoint: Path) -> Restored:
    return load_checkpoint(
        checkpoint, chunks=policy.chunks, optimizer=policy.optimizer, parallel=policy.parallel
    )


def _destroy(policy: Policy) -> None:
    policy.parallel.destroy()


def _resumes_exactly(case: Case, folder: Path) -> None:
    policy = _policy(case, case.saved_by, seed=0)
    _updates(policy, 1, BEFORE)
    checkpoint = _save(policy, folder, BEFORE)
    random_numbers = torch.rand(4)
    wanted = _updates(policy, BEFORE + 1, AFTER)
    wanted_weights = _weights(policy, case.family)
    _destroy(policy)

    policy = _policy(case, case.loaded_by, seed=1)  # other weights, other random states
    assert newest_complete(folder) == checkpoint
    restored = _load(policy, checkpoint)
    assert restored.step == BEFORE
    assert restored.state["prompts"] == {"epoch": 1, "position": 17}
    assert restored.random_states == (case.saved_by == case.loaded_by)
    if restored.random_states:
        assert torch.equal(torch.rand(4), random_numbers)
    norms = _updates(policy, BEFORE + 1, AFTER)
    assert norms == pytest.approx(wanted, rel=case.tolerance, abs=0), case
    weights = _weights(policy, case.family)
    for name, tensor in weights.items():
        scale = wanted_weights[name].abs().max().item()
        difference = (tensor - wanted_weights[name]).abs().max().item()
        assert difference <= case.tolerance * scale, (case, name, difference, scale)
    _destroy(policy)


def _a_shared_step_counter_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("qwen3", {"data": 2}, {"data": 2})
    policy = _policy(case, case.saved_by, seed=0)
    _updates(policy, 1, BEFORE)
    checkpoint = _save(policy, folder, BEFORE)
    wanted = _updates(policy, BEFORE + 1, AFTER)
    _destroy(policy)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_state, "_separate_steps", lambda adam: None)
        policy = _policy(case, case.loaded_by, seed=1)
        _load(policy, checkpoint)
    norms = _updates(policy, BEFORE + 1, AFTER)
    assert norms[0] == wanted[0]  # weights and moments are right
    assert norms[1] != pytest.approx(wanted[1], rel=1e-4)
    _destroy(policy)


def _saves_before_the_first_update(folder: Path) -> None:
    case = Case("qwen2", {"tensor": 2}, {"tensor": 2})
    policy = _policy(case, case.saved_by, seed=0)
    checkpoint = _save(policy, folder, 0)
    wanted = _updates(policy, 1, AFTER)
    _destroy(policy)
    policy = _policy(case, case.loaded_by, seed=1)
    _load(policy, checkpoint)
    assert _updates(policy, 1, AFTER) == wanted
    _destroy(policy)


def _keeps_and_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("qwen2", {"data": 2}, {"data": 2})
    policy = _policy(case, case.saved_by, seed=0)
    for step in (10, 20):
        _save(policy, folder, step, keep=1)
    assert not step_folder(folder, 10).exists()
    with monkeypatch.context() as patch:

        def disk_full(*args: object, **options: object) -> None:
            raise OSError("no space left on device")

        patch.setattr(checkpoint_save, "write_tensors", disk_full)
        with pytest.raises(CheckpointError, match="no space"):
            _save(policy, folder, 30, keep=1)
    assert newest_complete(folder) == step_folder(folder, 20)
    dist.barrier()
    victim = next(path for path in step_folder(folder, 20).rglob("*.distcp"))
    content = victim.read_bytes()
    dist.barrier()
    if policy.parallel.rank == 0:
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    dist.barrier()
    with pytest.raises(RuntimeError, match="differs from the digest"):
        _load(policy, step_folder(folder, 20))
    dist.barrier()
    if policy.parallel.rank == 0:
        victim.unlink()
    dist.barrier()
    with pytest.raises(RuntimeError, match="distcp is missing"):
        _load(policy, step_folder(folder, 20))
    _destroy(policy)


def _refuses_another_number_of_optimizers(folder: Path) -> None:
    case = Case("qwen3_moe", {"data": 2, "expert": 2}, {"data": 2})
    policy = _policy(case, case.saved_by, seed=0)
    checkpoint = _save(policy, folder, 1)
    wanted = _weights(policy, case.family)
    _destroy(policy)
    policy = _policy(case, case.loaded_by, seed=1)
    with pytest.raises(ValueError, match=r"holds 2 optimizers.*has 1"):
        _load(policy, checkpoint)
    load_checkpoint(checkpoint, chunks=policy.chunks, optimizer=None, parallel=policy.parallel)
    for name, tensor in _weights(policy, case.family).items():
        assert torch.equal(tensor, wanted[name]), name
    _destroy(policy)


def _stored(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a distributed checkpoint, whole."""
    folder = checkpoint / TENSORS
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {
        name: torch.empty(known.size, dtype=known.properties.dtype)
        for name, known in stored.items()
        if isinstance(known, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def _moments_are_carried_through_layouts(root: Path) -> None:
    """Tensor to pipeline to data parallel: every number of weights and moments is the same."""
    first: dict[str, Tensor] = {}
    checkpoint = None
    layouts: tuple[Layout, ...] = ({"tensor": 2}, {"pipeline": 2}, {"data": 2})
    for number, layout in enumerate(layouts):
        case = Case("qwen3", layout, layout)
        config = run_config(**layout)
        parallel = ParallelContext.create(config.parallel, seed=number)
        model = tiny_model("qwen3", seed=number, hidden_size=64, intermediate_size=96)
        policy = build_policy(config, model, parallel)
        if checkpoint is None:
            norms = [policy.update(_scored(policy, step)).grad_norm for step in (1, 2)]
            assert min(norms) > 0
        else:
            _load(policy, checkpoint)
        checkpoint = _save(policy, root / f"layout{number}", 2)
        if parallel.rank == 0:
            stored = _stored(checkpoint)
            moments = [name for name in stored if "exp_avg" in name]
            assert len(moments) >= 20 and all(stored[name].any() for name in moments)
            first = first or stored
            assert stored.keys() == first.keys(), case
            for name, tensor in stored.items():
                assert torch.equal(tensor, first[name]), (case, name)
        dist.barrier()
        _destroy(policy)


def _scored(policy: Policy, step: int) -> list[MicroBatch]:
    policy.start_step(step)
    micro_batches = pack(rollout_batch(512), policy.config, policy.parallel, 4)
    scored, _ = policy.logprobs(micro_batches)
    return [drift(m) for m in scored] if policy.parallel.is_last_stage else scored


def _walk(rank: int, world: int, root: Path) -> None:
    for number, case in enumerate(TWO_RANKS):
        _resumes_exactly(case, root / f"case{number}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        _a_shared_step_counter_would_be_seen(root / "shared_step", monkeypatch)
        _keeps_and_refuses(root / "keep", monkeypatch)
    _saves_before_the_first_update(root / "first")
    _moments_are_carried_through_layouts(root / "moments")
    _refuses_another_number_of_optimizers(root / "optimizers")


def test_two_ranks_resume_in_any_layout_as_if_never_stopped(tmp_path: Path) -> None:
    run_ranks(2, _walk, tmp_path)
