"""A broken gradient ends a run with a dump, and the dump breaks again in the same way."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_dapo.config.schema import RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.failed_update import (
    dump_folder,
    read_failed_update,
    replay,
    write_failed_update,
)
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.trained_model import SkippedUpdates
from tests.parallel.policy_cases import (
    build_policy,
    drift,
    model_of,
    pack,
    rollout_batch,
    run_config,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.parallel
STEP = 42


def _breaks_and_breaks_again(rank: int, world: int, folder: str) -> None:
    for layout in ({"data": 2}, {"pipeline": 2}):
        run_dir = Path(folder) / "_".join(layout)
        config = run_config(**layout).model_copy(update={"run_dir": run_dir})
        parallel = ParallelContext.create(config.parallel, seed=3)
        policy = build_policy(config, model_of("qwen3"), parallel)
        policy.start_step(STEP)
        packs, _ = policy.logprobs(pack(rollout_batch(512), config, parallel, 2))
        good = [drift(p) for p in packs] if parallel.is_last_stage else packs
        poisoned = parallel.dp_rank == parallel.dp_size - 1
        bad = [m.replace(advantages=m.advantages.clone()) for m in good]
        if poisoned:
            bad[1].advantages[bad[1].loss_mask] = math.inf
        skipped = SkippedUpdates(stop_after=3)
        for _ in range(2):
            skipped.note("actor", policy.update(bad), partial(write_failed_update, policy, bad, 0))
        assert not (run_dir / "dumps").exists(), "only the last one is written"
        with pytest.raises(RuntimeError, match=r"3 updates .*dumps/step_00000042.*replay"):
            last = policy.update(bad)
            skipped.note("actor", last, partial(write_failed_update, policy, bad, STEP))
        torch.distributed.barrier()
        _replays(policy, dump_folder(run_dir, STEP), config, parallel, poisoned)
        parallel.destroy()


def _replays(
    policy: Policy, folder: Path, config: RunConfig, parallel: ParallelContext, poisoned: bool
) -> None:
    failed = read_failed_update(folder, parallel.rank)
    assert (failed.step, failed.model) == (STEP, "actor")
    fresh = build_policy(config, model_of("qwen3"), parallel)
    with torch.no_grad():
        for parameter in fresh.chunks[0].parameters():
            parameter.add_(1.0)
    result, broken = replay(failed, fresh)
    assert result.skipped and not math.isfinite(result.grad_norm)
    for one, other in zip(policy.chunks, fresh.chunks, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b), "the replay starts from the weights of the dump"
    named = [line for line in broken if re.match(r"micro-batch 1: \d+ of \d+ .*advantages", line)]
    assert bool(named) == poisoned
    assert any(line.startswith("gradient of ") for line in broken)
    packs = failed.micro_batches
    repaired = [m.replace(advantages=m.advantages.nan_to_num(posinf=1.0)) for m in packs]
    assert math.isfinite(fresh.update(repaired).grad_norm)
    with pytest.raises(ValueError, match="files of 2 ranks, none of rank 7"):
        read_failed_update(folder, 7)


def test_a_dump_replays_to_the_same_broken_gradient(tmp_path: Path) -> None:
    run_ranks(2, _breaks_and_breaks_again, str(tmp_path))
