"""The plan against real ranks: they sit where it says, and hold what it has them send."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_dapo.config.schema import DataConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.model import build_chunks, padded_vocab_size
from megatron_dapo.resharding.layout import check_agrees, source_parameters
from megatron_dapo.resharding.load import load_hf_weights
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import EngineLayout, TrainLayout, build_plan
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model
from tests.unit.resharding.layouts import Case, matrix_box, vllm_parameters

VOCAB = 500  # padded differently by Megatron and vLLM
DENSE = ("qwen2_tied", "qwen3")
DENSE_LAYOUTS = (
    ParallelConfig(tensor=2),
    ParallelConfig(data=2),
    ParallelConfig(pipeline=2, virtual_pipeline=2),
)
MOE_LAYOUTS = (
    ParallelConfig(tensor=2),
    ParallelConfig(tensor=2, expert=2),
    ParallelConfig(context=2, expert=2, expert_tensor=1),
)
ENGINES = (
    EngineLayout(tensor=1, dtype="float32"),
    EngineLayout(tensor=4, dtype="float32"),
    EngineLayout(tensor=2, expert_parallel=True, dtype="float32"),
)


def _sends_what_the_engine_needs(folder: Path, layout: ParallelConfig) -> None:
    hf_config = transformers.AutoConfig.from_pretrained(folder)
    config = RunConfig(
        run_dir=folder,
        model=ModelConfig(path=folder, dtype="float32"),
        data=DataConfig(train=folder / "none.jsonl"),
        parallel=layout,
    )
    parallel = ParallelContext.create(layout, seed=1)
    chunks = build_chunks(config, hf_config, parallel)
    load_hf_weights(chunks, hf_config, folder, parallel)
    family = family_for(hf_config)
    train = TrainLayout.from_config(layout, padded_vocab_size(VOCAB, layout.tensor))
    sources = source_parameters(chunks, family, parallel)
    stored = load_file(folder / "model.safetensors")
    for engine in ENGINES:
        plan = build_plan(train, engine, family, bucket_bytes=20_000)
        check_agrees(plan, parallel, sources)
        case = Case(hf_config, train, engine, plan.bucket_bytes)
        expected = [vllm_parameters(case, stored, rank) for rank in range(engine.tensor)]
        count = 0
        for transfer in plan.transfers_from(parallel.rank):
            sent = matrix_box(sources[transfer.source].detach(), transfer.source_box)
            wanted = expected[transfer.receiver][transfer.target]
            assert torch.equal(sent, matrix_box(wanted, transfer.target_box)), transfer
            count += 1
        assert count > 0
    other = TrainLayout(data=4, padded_vocab_size=train.padded_vocab_size)
    plan = build_plan(other, ENGINES[0], family, bucket_bytes=20_000)
    with pytest.raises(RuntimeError, match="made for 4 trainer ranks, 2 are running"):
        check_agrees(plan, parallel, sources)
    parallel.destroy()


def _check_all(rank: int, world: int, root: Path) -> None:
    for family in DENSE:
        for layout in DENSE_LAYOUTS:
            _sends_what_the_engine_needs(root / family, layout)
    for layout in MOE_LAYOUTS:
        _sends_what_the_engine_needs(root / "qwen3_moe", layout)


@pytest.mark.parallel
def test_two_ranks_hold_what_the_plan_has_them_send(tmp_path: Path) -> None:
    for family in (*DENSE, "qwen3_moe"):
        model = tiny_model(family, hidden_size=64, intermediate_size=96, vocab_size=VOCAB)
        model.save_pretrained(tmp_path / family)
    run_ranks(2, _check_all, tmp_path)
