"""Write a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.checkpoint.durable_files import list_files
from megatron_dapo.checkpoint.folder_check import check_in_fresh_process
from megatron_dapo.checkpoint.safetensors_shards import tensor_records, write_shards
from megatron_dapo.config.whole_files import sync_directory

MODEL_FILES = ("generation_config.json", "*.py")
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*.model",
    "*.tiktoken",
)


def write_hf_folder(
    stream: Iterable[tuple[str, Tensor]],
    source_folder: Path,
    out: Path,
    *,
    expected: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tokenizer_folder: Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Write weights, configuration and tokenizer as one Hugging Face folder.

    Every rank that takes part in the stream calls it; global rank 0 writes, the others only
    iterate. Rank 0 holds one tensor beside the stream. The folder appears in one rename, after its
    files are flushed and another process has checked them; until then it is `.NAME.tmp`.

    Args:
        stream: (name, tensor) pairs on global rank 0, nothing elsewhere.
        source_folder: gives config.json, generation_config.json, tokenizer and chat template.
        expected: name -> shape of all tensors, in the order of the stream.
        dtype: of the tensors; stated in config.json.
        tokenizer_folder: tokenizer files from here instead, or one SentencePiece .model file.
        max_shard_bytes: most bytes of one file of weights.
        overwrite: replace an existing folder instead of refusing it.

    Raises:
        ValueError: `out` exists already, or `source_folder` has no config.json.
        RuntimeError: the stream did not bring every expected tensor, or a file is not as it must
            be. Nothing is left behind.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        for _ in stream:
            pass
        return
    check_paths(source_folder, out, overwrite)
    unfinished = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        write_shards(stream, unfinished, expected, dtype, max_shard_bytes)
        _write_config(source_folder / "config.json", unfinished / "config.json", dtype)
        _copy_files(source_folder, unfinished, MODEL_FILES)
        if tokenizer_folder is not None and tokenizer_folder.is_file():
            shutil.copyfile(tokenizer_folder, unfinished / "tokenizer.model")
        else:
            _copy_files(tokenizer_folder or source_folder, unfinished, TOKENIZER_FILES)
        check_in_fresh_process(unfinished, tensor_records(expected, dtype))
        _flush(unfinished)
        _put_in_place(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_paths(source_folder: Path, out: Path, overwrite: bool = False) -> None:
    """Refuse what cannot be written, before any weight is read.

    Raises:
        ValueError: `out` exists already, or `source_folder` has no config.json.
    """
    if not (source_folder / "config.json").is_file():
        raise ValueError(f"{source_folder} has no config.json to export with the weights")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists already; export to a new folder")
    if out.resolve() == source_folder.resolve():
        raise ValueError(f"cannot export over the source folder {source_folder}")


def _put_in_place(unfinished: Path, out: Path) -> None:
    """Rename; a folder that is replaced goes only once the new one can follow at once."""
    replaced = out.with_name(f".{out.name}.old")
    shutil.rmtree(replaced, ignore_errors=True)
    if out.exists():
        out.rename(replaced)
    unfinished.rename(out)
    sync_directory(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(folder: Path) -> None:
    for name in list_files(folder):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    for directory in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_directory(directory)


def _write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    config = json.loads(source.read_text())
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    target.write_text(json.dumps(config, indent=2) + "\n")


def _copy_files(source: Path, target: Path, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        for path in source.glob(pattern):
            if path.is_file():
                copy = target / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
