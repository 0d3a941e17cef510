"""A Llama of SmolLM2's proportions: 9 heads on 3 key/value heads divide over 3 ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import Tensor

from megatron_dapo.config.schema import DataConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.model import build_chunks
from megatron_dapo.resharding.load import HfFolder, load_hf_weights
from megatron_dapo.resharding.name_map import HfTensor
from tests.parallel.test_weights import VOCAB, _computes_what_transformers_computes, _round_trip
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

LARGE_LAYERS = 8  # 115 MB in float32
THREE = ParallelConfig(tensor=3)


def _own_memory() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kibibytes) * 1024


@contextmanager
def _growth() -> Iterator[list[int]]:
    """Samples of how much more memory this process holds than at the start."""
    before, samples, done = _own_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            samples.append(_own_memory() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _reads_only_its_slices(folder: Path, dtype: str) -> None:
    """Whatever the dtype of the folder, and without holding more than one parameter."""
    config = RunConfig(
        run_dir=folder,
        model=ModelConfig(path=folder, dtype="bfloat16"),
        data=DataConfig(train=folder / "none.jsonl"),
        parallel=THREE,
    )
    hf_config = transformers.AutoConfig.from_pretrained(folder)
    parallel = ParallelContext.create(THREE, seed=1)
    chunks = build_chunks(config, hf_config, parallel)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for parameter in parameters:
        parameter.data.fill_(float("nan"))
    taken: dict[str, int] = {}
    read = HfFolder.read

    def counted(source: HfFolder, tensor: HfTensor, dim: int, part: slice) -> Tensor:
        piece = read(source, tensor, dim, part)
        assert piece.dtype == getattr(torch, dtype)
        taken[tensor.name] = piece.numel()
        return piece

    HfFolder.read = counted  # type: ignore[method-assign]
    with _growth() as samples:
        load_hf_weights(chunks, hf_config, folder, parallel)
    HfFolder.read = read  # type: ignore[method-assign]
    padding = sum(p.numel() for p in parameters) - sum(taken.values())
    padded_rows = chunks[0].embedding.word_embeddings.weight.shape[0]
    past_the_end = max(0, padded_rows * (parallel.rank + 1) - VOCAB)
    assert padding == min(padded_rows, past_the_end) * hf_config.hidden_size
    share = sum(parameter.nbytes for parameter in parameters)
    assert share > 15e6
    assert max(samples) < 0.5 * share, (max(samples), share)
    assert all(parameter.isfinite().all() for parameter in parameters)
    parallel.destroy()


def _walk(rank: int, world: int, root: Path) -> None:
    _round_trip(root / "small", THREE)
    _computes_what_transformers_computes(root / "small", THREE)
    for dtype in ("float32", "bfloat16"):
        _reads_only_its_slices(root / dtype, dtype)


def test_a_tied_llama_with_three_key_value_heads(tmp_path: Path) -> None:
    small = tiny_model("smollm2", intermediate_size=96, vocab_size=VOCAB)
    assert small.config.rope_parameters["rope_theta"] == 100000.0
    small.save_pretrained(tmp_path / "small", max_shard_size="2MB")
    large = tiny_model("smollm2", layers=LARGE_LAYERS, intermediate_size=1536, vocab_size=VOCAB)
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype).removeprefix("torch.")
        large.to(dtype).save_pretrained(folder, max_shard_size="30MB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    run_ranks(3, _walk, tmp_path)
