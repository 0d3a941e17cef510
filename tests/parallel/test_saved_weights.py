"""Checkpoints of every layout, read without a model: no bit differs from what was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from megatron_dapo.checkpoint.commit import TENSORS
from megatron_dapo.checkpoint.state import save_checkpoint
from megatron_dapo.config.schema import ParallelConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.policy import Policy
from megatron_dapo.resharding.load import load_hf_weights
from megatron_dapo.resharding.saved_weights import saved_weights
from tests.parallel.policy_cases import run_config
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

VOCAB = 600  # saved as 640 rows by one tensor rank, as 768 by two
MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "qwen2_tied": ("qwen2_tied", {}),
    "llama": ("llama", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "some dense layers": ("qwen3_moe", {"decoder_sparse_step": 2}),
}
SAVED = [
    ("qwen2_tied", ParallelConfig(pipeline=2, virtual_pipeline=2)),
    ("llama", ParallelConfig(tensor=2)),
    ("qwen3_moe", ParallelConfig(tensor=2, expert_tensor=2)),
    ("some dense layers", ParallelConfig(data=2, expert=2)),
]


def _save(rank: int, world: int, root: Path) -> None:
    """With its optimizer, whose state lies in the same files."""
    for index, (name, layout) in enumerate(SAVED):
        hf_config = transformers.AutoConfig.from_pretrained(root / name)
        parallel = ParallelContext.create(layout, seed=1)
        config = run_config(dtype="float32", **layout.model_dump(exclude_defaults=True))
        policy = Policy.build(config, hf_config, parallel)
        load_hf_weights(policy.chunks, hf_config, root / name, parallel)
        save_checkpoint(
            root / str(index),
            0,
            chunks=policy.chunks,
            optimizer=policy.optimizer,
            state={},
            parallel=parallel,
            keep=1,
        )
        parallel.destroy()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name, (family, options) in MODELS.items():
        model = tiny_model(
            family, hidden_size=64, intermediate_size=96, vocab_size=VOCAB, **options
        )
        model.save_pretrained(folder / name)
    run_ranks(2, _save, folder)
    return folder


def _tensors(root: Path, index: int) -> Path:
    return root / str(index) / "step_00000000" / TENSORS


@pytest.mark.parametrize("index", range(len(SAVED)))
def test_a_checkpoint_gives_the_folder_it_was_loaded_from(root: Path, index: int) -> None:
    assert not dist.is_initialized()
    name, _ = SAVED[index]
    hf_config = transformers.AutoConfig.from_pretrained(root / name)
    stream = saved_weights(_tensors(root, index), hf_config, dtype=torch.float32)
    stored = load_file(root / name / "model.safetensors")
    assert stored.keys() == stream.tensors.keys()
    received = list(stream)
    assert [name for name, _ in received] == list(stream.tensors)
    for name, tensor in received:
        assert torch.equal(tensor, stored[name]), name
    rounded = dict(saved_weights(_tensors(root, index), hf_config, dtype=torch.bfloat16))
    assert all(torch.equal(rounded[name], stored[name].bfloat16()) for name in stored)


@pytest.mark.parametrize(
    ("config_class", "change", "message"),
    [
        (Qwen2Config, {"num_hidden_layers": 3}, r"holds 'decoder\.layers\.[\w.]+' .*\(4, .*\(3, "),
        (Qwen2Config, {"tie_word_embeddings": False}, r"has no 'output_layer\.weight'"),
        (LlamaConfig, {}, r"holds 'decoder\.layers\.self_attention\.linear_qkv\.bias', which"),
        (Qwen2Config, {"vocab_size": 641}, r"'embedding\.word_emb.*\(640, 64\).*\(641, 64\)"),
        (Qwen2Config, {"hidden_size": 128}, r"of shape \(640, 64\).*asks for \(600, 128\)"),
    ],
    ids=["layers", "head", "biases", "vocabulary", "width"],
)
def test_the_weights_of_another_model_are_refused_by_name(
    root: Path, config_class: type[PretrainedConfig], change: dict[str, object], message: str
) -> None:
    right = transformers.AutoConfig.from_pretrained(root / "qwen2_tied").to_dict()
    own = {"model_type": config_class.model_type, "layer_types": None, "head_dim": None}
    wrong = config_class(**{**right, **own, **change})
    with pytest.raises(ValueError, match=message):
        saved_weights(_tensors(root, 0), wrong, dtype=torch.float32)


def test_a_head_that_the_model_ties_is_not_dropped_in_silence(root: Path) -> None:
    hf_config = transformers.AutoConfig.from_pretrained(root / "llama")
    hf_config.tie_word_embeddings = True
    with pytest.raises(ValueError, match=r"holds 'output_layer\.weight', which belongs to no"):
        saved_weights(_tensors(root, 1), hf_config, dtype=torch.float32)


def test_pieces_that_leave_a_gap_are_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost piece would leave whatever lay in memory."""
    read = FileSystemReader.read_metadata

    def without_a_piece(reader: FileSystemReader) -> Metadata:
        metadata = read(reader)
        metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
        return metadata

    monkeypatch.setattr(FileSystemReader, "read_metadata", without_a_piece)
    hf_config = transformers.AutoConfig.from_pretrained(root / "qwen2_tied")
    with pytest.raises(ValueError, match=r"'decoder\.layers\.mlp\.linear_fc2\.weight' cover"):
        list(saved_weights(_tensors(root, 0), hf_config, dtype=torch.float32))
