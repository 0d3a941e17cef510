"""Write a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_dapo.checkpoint.commit import list_files, record_files, sync_directory

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
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


@dataclass(frozen=True)
class ExportCheck:
    """Verdict on the names of an exported folder."""

    ok: bool
    names: tuple[str, ...]
    """Files and tensors that are missing."""


def check_export(
    weight_map: Mapping[str, str],
    files: Mapping[str, Collection[str]],
    expected: Collection[str] = (),
) -> ExportCheck:
    """Compare an index with the tensors that its files really hold.

    Args:
        weight_map: tensor name -> file name, from the index.
        files: file name -> names of the tensors in it, of each file that exists.
        expected: names that the model needs.
    """
    missing = sorted(set(weight_map.values()) - set(files))
    missing += sorted(n for n, file in weight_map.items() if file in files and n not in files[file])
    missing += sorted(set(expected) - set(weight_map))
    return ExportCheck(ok=not missing, names=tuple(missing))


def write_hf_folder(
    stream: Iterable[tuple[str, Tensor]],
    source_folder: Path,
    out: Path,
    *,
    expected: Collection[str],
    dtype: torch.dtype,
    tokenizer_folder: Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Write weights, configuration and tokenizer as one Hugging Face folder.

    Every rank that takes part in the stream calls it; global rank 0 writes, the others only
    iterate. The folder appears in one rename, after its files are flushed and read back.

    Args:
        stream: (name, tensor) pairs on global rank 0, nothing elsewhere.
        source_folder: gives config.json, generation_config.json, tokenizer and chat template.
        expected: names of all tensors that the folder must hold.
        dtype: of the tensors; stated in config.json.
        tokenizer_folder: tokenizer files from here instead, or one SentencePiece .model file.
        max_shard_bytes: most tensor bytes in one file.
        overwrite: replace an existing folder instead of refusing it.

    Raises:
        ValueError: `out` exists already, or `source_folder` has no config.json.
        RuntimeError: the stream did not bring every expected tensor, or a file reads back wrong.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        for _ in stream:
            pass
        return
    _check_paths(source_folder, out, overwrite)
    unfinished = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    weight_map = _write_shards(stream, unfinished, max_shard_bytes)
    _write_config(source_folder / "config.json", unfinished / "config.json", dtype)
    _copy_files(source_folder, unfinished, MODEL_FILES)
    if tokenizer_folder is not None and tokenizer_folder.is_file():
        shutil.copyfile(tokenizer_folder, unfinished / "tokenizer.model")
    else:
        _copy_files(tokenizer_folder or source_folder, unfinished, TOKENIZER_FILES)
    _verify(unfinished, weight_map, expected)
    record_files(unfinished, list_files(unfinished))
    sync_directory(unfinished)
    if out.exists():
        shutil.rmtree(out)
    unfinished.rename(out)
    sync_directory(out.parent)


def _check_paths(source_folder: Path, out: Path, overwrite: bool) -> None:
    if not (source_folder / "config.json").is_file():
        raise ValueError(f"{source_folder} has no config.json to export with the weights")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists already; export to a new folder")
    if out.resolve() == source_folder.resolve():
        raise ValueError(f"cannot export over the source folder {source_folder}")


def _write_shards(
    stream: Iterable[tuple[str, Tensor]], folder: Path, max_shard_bytes: int
) -> dict[str, str]:
    """Write shards as they fill up; returns tensor name -> file name."""
    shards: list[list[str]] = []
    total_bytes = 0

    def write(tensors: dict[str, Tensor]) -> None:
        save_file(tensors, folder / f"shard-{len(shards)}.tmp", metadata={"format": "pt"})
        shards.append(list(tensors))

    waiting: dict[str, Tensor] = {}
    waiting_bytes = 0
    for name, tensor in stream:
        if waiting and waiting_bytes + tensor.nbytes > max_shard_bytes:
            write(waiting)
            waiting, waiting_bytes = {}, 0
        waiting[name] = tensor.detach().cpu().contiguous()
        waiting_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    write(waiting)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        file = SINGLE_FILE if len(shards) == 1 else file
        (folder / f"shard-{number}.tmp").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return weight_map


def _write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    config = json.loads(source.read_text())
    config.pop("quantization_config", None)  # the exported tensors are not quantised
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


def _verify(folder: Path, weight_map: Mapping[str, str], expected: Collection[str]) -> None:
    files = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            files[path.name] = set(file.keys())
    check = check_export(weight_map, files, expected)
    if not check.ok:
        raise RuntimeError(
            f"the exported folder lacks {len(check.names)} names, first {check.names[0]!r}; "
            "it was left unfinished"
        )
    unknown = sorted(set(weight_map) - set(expected))
    if unknown:
        raise RuntimeError(f"the stream brought {unknown[0]!r}, which the model does not have")
