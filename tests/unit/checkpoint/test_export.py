"""Exported folders: complete, checked, and in place at once or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from megatron_dapo.checkpoint.export import write_hf_folder
from tests.tiny_models import save_tiny_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    save_tiny_model(folder, "qwen2", layers=1, hidden_size=64, intermediate_size=96)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "optimizer.pt").write_text("not part of the model")
    return folder


def weights(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_the_folder_holds_weights_configuration_and_tokenizer(source: Path, tmp_path: Path) -> None:
    tensors = weights(source, torch.bfloat16)
    out = tmp_path / "new" / "out"
    write_hf_folder(
        iter(tensors.items()), source, out, expected=shapes(tensors), dtype=torch.bfloat16
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, tensors[name])


def test_shards_stay_below_the_limit_and_the_index_lists_them(source: Path, tmp_path: Path) -> None:
    tensors = weights(source, torch.float32)
    out = tmp_path / "out"
    write_hf_folder(
        iter(tensors.items()),
        source,
        out,
        expected=shapes(tensors),
        dtype=torch.float32,
        max_shard_bytes=200_000,
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) == 3
    assert files[0] == "model-00001-of-00003.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert all((out / file).stat().st_size < 210_000 for file in files)


def test_an_incomplete_stream_leaves_no_folder(source: Path, tmp_path: Path) -> None:
    tensors = weights(source, torch.float32)
    partial = dict(list(tensors.items())[:-1])
    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        write_hf_folder(
            iter(partial.items()),
            source,
            tmp_path / "out",
            expected=shapes(tensors),
            dtype=torch.float32,
        )
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_replaced_only_on_request(source: Path, tmp_path: Path) -> None:
    tensors = weights(source, torch.float32)
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()

    def write(overwrite: bool) -> None:
        write_hf_folder(
            iter(tensors.items()),
            source,
            out,
            expected=shapes(tensors),
            dtype=torch.float32,
            overwrite=overwrite,
        )

    with pytest.raises(ValueError, match="exists already"):
        write(False)
    write(True)
    assert not (out / "old").exists()
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize("is_file", [False, True])
def test_the_tokenizer_may_come_from_elsewhere(source: Path, tmp_path: Path, is_file: bool) -> None:
    tensors = weights(source, torch.float32)
    tokenizer = tmp_path / "elsewhere"
    tokenizer.mkdir()
    model_file = tokenizer / ("pieces.model" if is_file else "tokenizer.model")
    model_file.write_text("pieces")
    write_hf_folder(
        iter(tensors.items()),
        source,
        tmp_path / "out",
        expected=shapes(tensors),
        dtype=torch.float32,
        tokenizer_folder=model_file if is_file else tokenizer,
    )
    assert (tmp_path / "out" / "tokenizer.model").read_text() == "pieces"
    assert not (tmp_path / "out" / "tokenizer.json").exists()
