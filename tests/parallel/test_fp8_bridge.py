"""FP8 engines under real layouts whose shards cut blocks: the ranks exchange their maxima."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.config.schema import ParallelConfig
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.train_map import TrainLayout
from tests.parallel.test_bridge import ENGINE_TENSOR, _config, _Run, _running, _small
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model
from tests.unit.resharding.fp8_layouts import bits, expected
from tests.unit.resharding.layouts import Case

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 500, "layers": 2}
MODELS: dict[str, dict[str, int]] = {
    "qwen2": {"hidden_size": 256, "intermediate_size": 768},
    "qwen3_moe": {
        "hidden_size": 128,
        "head_dim": 64,
        "moe_intermediate_size": 768,
        "num_experts": 2,
    },
}
LAYOUTS = {
    "qwen2": ParallelConfig(tensor=4),
    "qwen3_moe": ParallelConfig(tensor=4, expert_tensor=4),
}


def _assert_holds(run: _Run, sent: list[dict[str, str]] | None, added: float) -> None:
    """Bytes as vLLM lays out matrices that were quantised whole; digests as the trainers say."""
    if sent is None:
        return
    stored = load_file(run.config.model.path / "model.safetensors")
    tensors = {name: tensor + added for name, tensor in stored.items()}
    case = Case(
        run.hf_config,
        TrainLayout(padded_vocab_size=1),
        EngineLayout(tensor=ENGINE_TENSOR, quantization="fp8"),
        1,
    )
    for engine in run.workers:
        for rank, worker in enumerate(engine):
            wanted = expected(case, tensors, rank)
            assert worker.tensors.keys() == wanted.keys()
            for name, tensor in worker.tensors.items():
                assert torch.equal(bits(tensor), bits(wanted[name])), name
            assert worker.weights.digests() == sent[rank]


def _updates(folder: Path, layout: ParallelConfig, transport: str) -> None:
    config = _config(folder, layout, transport, "bfloat16", "fp8")
    with _running(config, folder.parent) as run:
        assert run.bridge.plan.shared_blocks > 0
        _assert_holds(run, run.sync(1), 0.0)
        for parameter in run.bridge.outbox.sources.values():
            parameter.data += 0.5
        _assert_holds(run, run.sync(2), 0.5)
        if run.parallel.rank == 3:
            damaged = next(iter(run.bridge.plan.block_sources(3)))
            run.bridge.outbox.sources[damaged].data[0, 0] = float("nan")
        wanted = "q_proj.*an infinity or NaN" if run.parallel.rank == 3 else r"trainer ranks \[3\]"
        with pytest.raises(RuntimeError, match=wanted):
            run.bridge.prepare(3)  # the engines have not been told


def _walk(rank: int, world: int, root: Path) -> None:
    _small()
    _updates(root / "qwen2", LAYOUTS["qwen2"], "files")
    _updates(root / "qwen3_moe", LAYOUTS["qwen3_moe"], "gloo")


def test_blocks_that_lie_on_several_ranks_arrive_as_if_on_one(tmp_path: Path) -> None:
    for family, sizes in MODELS.items():
        tiny_model(family, **SIZES | sizes).save_pretrained(tmp_path / family)
    run_ranks(4, _walk, tmp_path)
