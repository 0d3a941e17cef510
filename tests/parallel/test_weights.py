"""Hugging Face -> Megatron -> Hugging Face under every layout: no bit may change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from megatron_dapo.checkpoint.export import write_hf_folder
from megatron_dapo.config.schema import DataConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_dapo.device import install_cpu_support
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.model import build_chunks
from megatron_dapo.resharding.layout import local_parameters
from megatron_dapo.resharding.load import load_hf_weights
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.transfer import export_stream
from tests.ranks import run_ranks
from tests.tiny_models import FAMILIES, tiny_model

install_cpu_support()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

VOCAB = 500  # not a multiple of Megatron's padding
SMALL_BUCKET = 40_000  # bytes: several parameters a bucket, and some larger than one
TWO_RANKS = [
    ParallelConfig(data=2),
    ParallelConfig(tensor=2),
    ParallelConfig(context=2),
    ParallelConfig(pipeline=2),
    ParallelConfig(pipeline=2, virtual_pipeline=2),
]
TWO_RANKS_MOE = [
    ParallelConfig(data=2, expert=2),
    ParallelConfig(tensor=2, expert=2),
    ParallelConfig(tensor=2, expert_tensor=1),
]
FOUR_RANKS = [
    ParallelConfig(tensor=2, pipeline=2),
    ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=2),
    ParallelConfig(tensor=2, data=2),
]
FOUR_RANKS_MOE = [
    ParallelConfig(pipeline=2, data=2, expert=2),
    ParallelConfig(tensor=2, data=2, expert=2, expert_tensor=2),
    ParallelConfig(tensor=2, data=2, expert=4),
]


def _write_folders(root: Path) -> None:
    for family in FAMILIES:
        model = tiny_model(family, hidden_size=64, intermediate_size=96, vocab_size=VOCAB)
        sharded = family in ("llama", "qwen3", "qwen3_moe")
        model.save_pretrained(root / family, max_shard_size="400KB" if sharded else "5GB")


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def _config(folder: Path, layout: ParallelConfig) -> RunConfig:
    return RunConfig(
        run_dir=folder,
        model=ModelConfig(path=folder, dtype="float32"),
        data=DataConfig(train=folder / "none.jsonl"),
        parallel=layout,
    )


def _loaded_policy(folder, layout):  # type: ignore[no-untyped-def]
    hf_config = transformers.AutoConfig.from_pretrained(folder)
    parallel = ParallelContext.create(layout, seed=1)
    chunks = build_chunks(_config(folder, layout), hf_config, parallel)
    for chunk in chunks:  # nothing that the load leaves out may look right
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    load_hf_weights(chunks, hf_config, folder, parallel)
    return hf_config, parallel, chunks


def _round_trip(folder: Path, layout: ParallelConfig) -> None:
    hf_config, parallel, chunks = _loaded_policy(folder, layout)
    for chunk in chunks:
        assert all(parameter.isfinite().all() for parameter in chunk.parameters())
    stream = export_stream(chunks, hf_config, parallel, bucket_bytes=SMALL_BUCKET)
    received = dict(stream)
    if parallel.rank == 0:
        stored = _stored(folder)
        assert list(received) == list(stream.tensors)
        assert received.keys() == stored.keys()
        for name, tensor in received.items():
            assert torch.equal(tensor, stored[name]), (folder.name, layout, name)
    else:
        assert not received
    parallel.destroy()


def _sees_updates_of_every_owner(folder: Path, layout: ParallelConfig) -> None:
    """Each rank adds its own mark: the export must carry the mark of the rank that owns it."""
    hf_config, parallel, chunks = _loaded_policy(folder, layout)
    family = family_for(hf_config)
    for entry, parameter in local_parameters(chunks, family, parallel).items():
        layer = -1.0 if entry.layer is None else float(entry.layer)
        expert = 0.0 if entry.expert is None else 100.0 * entry.expert
        parameter.data.fill_(layer + expert)
    for name, tensor in export_stream(chunks, hf_config, parallel, bucket_bytes=SMALL_BUCKET):
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        wanted = -1.0 if not numbers else numbers[0] + (100.0 * numbers[1] if numbers[1:] else 0)
        assert (tensor == wanted).all(), name
    parallel.destroy()


def _computes_what_transformers_computes(folder: Path, layout: ParallelConfig) -> None:
    """The fused tensors could be wrong and still invert each other: look at the logits too."""
    _, parallel, (model,) = _loaded_policy(folder, layout)
    tokens = torch.arange(24) * 7 % VOCAB
    bounds = torch.tensor([0, 24], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=24, max_seqlen_kv=24)
    with torch.no_grad():
        local = model(tokens[None], torch.arange(24)[None], None, packed_seq_params=packed)
        shards = [torch.empty_like(local) for _ in range(parallel.tp_size)]
        dist.all_gather(shards, local.contiguous(), group=parallel.tp_group)
        logits = torch.cat(shards, dim=-1)[0, :, :VOCAB]
        wanted = transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens[None]).logits[0]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)
    parallel.destroy()


def _exports_a_folder(folder: Path, out: Path, layout: ParallelConfig) -> None:
    hf_config, parallel, chunks = _loaded_policy(folder, layout)
    stream = export_stream(chunks, hf_config, parallel)
    write_hf_folder(
        stream,
        folder,
        out,
        expected=stream.tensors,
        dtype=stream.dtype,
        max_shard_bytes=300_000,
    )
    dist.barrier()
    parallel.destroy()


def _bf16_halves_the_wire(folder: Path, layout: ParallelConfig) -> None:
    hf_config, parallel, chunks = _loaded_policy(folder, layout)
    stream = export_stream(chunks, hf_config, parallel, dtype=torch.bfloat16)
    for name, tensor in stream:
        assert torch.equal(tensor, _stored(folder)[name].bfloat16()), name
    parallel.destroy()


def _refuses_wrong_folders(root: Path, layout: ParallelConfig) -> None:
    parallel = ParallelContext.create(layout, seed=1)
    good = root / "qwen2"
    hf_config = transformers.AutoConfig.from_pretrained(good)
    chunks = build_chunks(_config(good, layout), hf_config, parallel)
    for folder, message in (
        ("missing", r"model\.layers\.1\.mlp\.up_proj\.weight"),
        ("extra", r"self_attn\.q_norm\.weight"),
        ("shape", r"model\.layers\.2\.self_attn\.k_proj\.weight.*\(48, 64\).*\(32, 64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            load_hf_weights(chunks, hf_config, root / folder, parallel)
    chunks[0].register_parameter("gate", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match="'gate'"):
        load_hf_weights(chunks, hf_config, good, parallel)
    with pytest.raises(ValueError, match="'gate'"):
        export_stream(chunks, hf_config, parallel)
    parallel.destroy()


def _write_wrong_folders(root: Path) -> None:
    tensors = load_file(root / "qwen2" / "model.safetensors")
    missing = {n: t for n, t in tensors.items() if n != "model.layers.1.mlp.up_proj.weight"}
    extra = tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    shape = tensors | {"model.layers.2.self_attn.k_proj.weight": torch.ones(48, 64)}
    for name, content in (("missing", missing), ("extra", extra), ("shape", shape)):
        (root / name).mkdir()
        save_file(content, root / name / "model.safetensors")


def _walk_two_ranks(rank: int, world: int, root: Path) -> None:
    for family in FAMILIES:
        for layout in TWO_RANKS + (TWO_RANKS_MOE if family == "qwen3_moe" else []):
            _round_trip(root / family, layout)
        _computes_what_transformers_computes(root / family, ParallelConfig(tensor=2))
    _computes_what_transformers_computes(root / "qwen3_moe", TWO_RANKS_MOE[0])
    _sees_updates_of_every_owner(root / "qwen3_moe", TWO_RANKS_MOE[0])
    _sees_updates_of_every_owner(root / "qwen3", TWO_RANKS[-1])
    for family in FAMILIES:
        _exports_a_folder(root / family, root / f"{family}_out", ParallelConfig(tensor=2))
    _bf16_halves_the_wire(root / "qwen2_tied", ParallelConfig(tensor=2))
    _refuses_wrong_folders(root, ParallelConfig(tensor=2))


def _walk_four_ranks(rank: int, world: int, root: Path) -> None:
    for family in ("llama", "qwen2_tied", "qwen3"):
        for layout in FOUR_RANKS:
            _round_trip(root / family, layout)
    for layout in FOUR_RANKS_MOE:
        _round_trip(root / "qwen3_moe", layout)
        _sees_updates_of_every_owner(root / "qwen3_moe", layout)


def test_two_ranks_load_and_export_without_changing_a_bit(tmp_path: Path) -> None:
    _write_folders(tmp_path)
    _write_wrong_folders(tmp_path)
    run_ranks(2, _walk_two_ranks, tmp_path)
    tokens = torch.arange(40).view(2, 20) * 7 % VOCAB
    for family in FAMILIES:
        source = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family)
        exported, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / f"{family}_out", output_loading_info=True
        )
        assert not any(info.values()), info
        assert exported.dtype == torch.float32
        assert (tmp_path / f"{family}_out" / "model.safetensors.index.json").is_file()
        with torch.no_grad():
            assert torch.equal(exported(tokens).logits, source(tokens).logits), family


def test_four_ranks_load_and_export_without_changing_a_bit(tmp_path: Path) -> None:
    _write_folders(tmp_path)
    run_ranks(4, _walk_four_ranks, tmp_path)
