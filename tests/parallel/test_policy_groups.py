"""Process groups of a layout, and the collectives over them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.batch.packing import context_slice
from megatron_dapo.config.schema import ParallelConfig
from megatron_dapo.parallel.collectives import broadcast_tensors, gather_sequence, zigzag_index
from megatron_dapo.parallel.context import ParallelContext
from tests.parallel.policy_cases import pack, rollout_batch, run_config
from tests.ranks import run_ranks


def _check_all(rank: int, world: int) -> None:
    _groups_follow_the_layout(rank)
    _a_destroyed_layout_leaves_no_threads()
    _a_wrong_world_is_refused()
    _named_tensors_arrive_bitwise(rank)
    _gathering_sums_gradients(rank, world)
    _attention_and_packing_cut_alike()


def _groups_follow_the_layout(rank: int) -> None:
    for layout, first, last in (
        (ParallelConfig(tensor=2), (0, 1), (0, 1)),
        (ParallelConfig(pipeline=2), (0,), (1,)),
        (ParallelConfig(data=2, expert=2), (0, 1), (0, 1)),
        (ParallelConfig(context=2), (0, 1), (0, 1)),
    ):
        parallel = ParallelContext.create(layout, seed=1)
        sizes = (parallel.tp_size, parallel.pp_size, parallel.cp_size, parallel.dp_size)
        assert sizes == (layout.tensor, layout.pipeline, layout.context, layout.data)
        assert parallel.ep_size == layout.expert and parallel.etp_size == layout.expert_tensor_size
        assert parallel.dp_cp_group.size() == layout.data * layout.context
        assert parallel.is_first_stage == (rank in first)
        assert parallel.is_last_stage == (rank in last)
        noise = [torch.empty(4) for _ in range(2)]
        dist.all_gather(noise, torch.randn(4), group=parallel.control_group)
        assert torch.equal(*noise) == (layout.pipeline == 1), "stages draw different weights"
        parallel.destroy()


def _a_destroyed_layout_leaves_no_threads() -> None:
    threads = []
    for _ in range(3):
        ParallelContext.create(ParallelConfig(tensor=2), seed=1).destroy()
        gc.collect()
        threads.append(len(list(Path("/proc/self/task").iterdir())))
    assert threads[0] == threads[1] == threads[2], threads


def _a_wrong_world_is_refused() -> None:
    for layout, message in (
        (ParallelConfig(tensor=4), "= 4 ranks, but 2 were started"),
        (ParallelConfig(data=2, expert=4), "does not divide 2 ranks"),
        (ParallelConfig(data=2, virtual_pipeline=2), "needs parallel.pipeline >= 2"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelContext.create(layout, seed=1)


def _named_tensors_arrive_bitwise(rank: int) -> None:
    sent = {
        "bf16": torch.tensor([[1.5, float("nan")]], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "strided": torch.arange(6).view(2, 3).t(),
        "scalar": torch.tensor(7, dtype=torch.int64),
    }
    got = broadcast_tensors(sent if rank == 0 else None, src_rank=0, group=dist.group.WORLD)
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert torch.equal(got[name].nan_to_num(), tensor.nan_to_num()), name


def _gathering_sums_gradients(rank: int, world: int) -> None:
    local = torch.full((2, 3), float(rank), requires_grad=True)
    whole = gather_sequence(local, dist.group.WORLD)
    assert whole[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    (whole * (rank + 1) * torch.arange(4.0)[:, None]).sum().backward()
    assert local.grad is not None
    assert local.grad[:, 0].tolist() == [3.0 * (2 * rank), 3.0 * (2 * rank + 1)]


def _attention_and_packing_cut_alike() -> None:
    config = run_config(context=2)
    parallel = ParallelContext.create(config.parallel, seed=1)
    for micro_batch in pack(rollout_batch(512), config, parallel, 2):
        numbered = micro_batch.replace(tokens=torch.arange(micro_batch.num_tokens))
        mine = context_slice(numbered, parallel.cp_rank, 2).tokens
        assert torch.equal(mine, zigzag_index(micro_batch.cu_seqlens, 2)[parallel.cp_rank])
    parallel.destroy()


def test_groups_and_collectives_on_two_ranks() -> None:
    run_ranks(2, _check_all)
