"""What a run cannot change on its way: seed, prompts, start model. And what it may, by name."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from megatron_dapo.checkpoint.header import read_header, read_state
from megatron_dapo.config import ConfigError, RunConfig
from megatron_dapo.config.redact import redact
from megatron_dapo.config.versions import installed_versions

logger = logging.getLogger(__name__)

IDENTITY, CONFIG, VERSIONS = "identity", "config", "versions"
"""States of a checkpoint."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Blocks that are read of each file of weights, and the size of one."""
NOT_COMPARED = ("run_dir", "logging.", "checkpoint.", "training.steps", "evaluation.")
"""Keys that do not change what is trained."""
OF_THE_OPTIMIZER = "parallel.distributed_optimizer"
"""Its state is saved in one way or the other, whatever the layout."""
OF_THE_EXPERTS = "parallel.expert"
"""1: one optimizer holds dense and expert weights; more: two. Neither is cut into the other."""
OF_THE_MASTERS = "model.dtype"
"""An optimizer that is not sharded keeps fp32 masters beside bfloat16 weights, and none beside
float32 ones."""


def run_identity(config: RunConfig, prompts: str) -> dict[str, JsonValue]:
    """The named states that tell one run from another.

    Args:
        prompts: fingerprint of the prompts as they are trained on.
    """
    return {
        IDENTITY: {
            "seed": {"value": config.seed, "of": ""},
            "data.train": {"value": prompts, "of": str(config.data.train)},
            "model.path": {
                "value": model_fingerprint(config.model.path),
                "of": str(config.model.path),
            },
        },
        CONFIG: redact(config.model_dump(mode="json")),  # type: ignore[dict-item]
        VERSIONS: dict(installed_versions()),
    }


def check_identity(checkpoint: Path, here: Mapping[str, JsonValue]) -> None:
    """Refuse to go on from another run's checkpoint; say which keys and versions changed.

    Weights alone (from `megatron-dapo convert`) belong to no run.

    Args:
        here: of `run_identity`.

    Raises:
        ConfigError: seed, prompts, model or what the optimizer holds differ, named with both
            values; or another version of this package wrote the checkpoint in another format.
    """
    read_header(checkpoint)
    identity = read_state(checkpoint, IDENTITY)
    if identity is None:
        return
    problems = list(_mismatches(checkpoint, identity, here[IDENTITY]))
    changes = list(_changes(read_state(checkpoint, CONFIG), here[CONFIG]))
    sharded = cast(Mapping[str, Any], here[CONFIG])["parallel"]["distributed_optimizer"]
    for key, before, now in changes:
        problems += _of_the_optimizer(checkpoint, key, before, now, sharded=sharded)
    if problems:
        raise ConfigError(problems)
    for key, before, now in changes:
        if not key.startswith(NOT_COMPARED):
            logger.warning(
                "%s: %s was %s, it is %s from here on", checkpoint.name, key, before, now
            )
    for key, before, now in _changes(read_state(checkpoint, VERSIONS), here[VERSIONS]):
        logger.warning("%s was made with %s %s, this is %s", checkpoint.name, key, before, now)


def model_fingerprint(folder: Path) -> str:
    """SHA-256 over config.json, and over size and samples of every file of weights.

    Reads the headers and 256 KiB of each file, whatever its size: enough to tell two models apart,
    no proof that every number is the same.
    """
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(json.dumps(json.loads(config.read_text()), sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(sample * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _mismatches(checkpoint: Path, there: JsonValue, here: JsonValue) -> Iterator[str]:
    assert isinstance(there, Mapping) and isinstance(here, Mapping), f"{there} and {here}"
    for key, mine in here.items():
        saved = there[key]
        assert isinstance(saved, Mapping) and isinstance(mine, Mapping), f"{saved} and {mine}"
        if saved["value"] != mine["value"]:
            yield (
                f"{key}={_told(mine)}: {checkpoint} was trained with {_told(saved)}. Go on with "
                "what it was trained with, or start a new run in another run_dir"
            )


def _of_the_optimizer(
    checkpoint: Path, key: str, before: JsonValue, now: JsonValue, *, sharded: bool
) -> Iterator[str]:
    """Why the saved state of the optimizer cannot be gone on with, where `key` is the cause."""
    if key == OF_THE_OPTIMIZER or (key == OF_THE_MASTERS and not sharded):
        wanted, which = str(before), f"{key}={before}"
    elif key == OF_THE_EXPERTS and 1 in (before, now):
        wanted = "1" if before == 1 else "more than 1"
        which = f"{key}={before}" if before == 1 else f"{key}={before} (or another size above 1)"
    else:
        return
    yield (
        f"{key}={now}: {checkpoint} was trained with {before}, and its optimizer goes on with "
        f"{wanted} alone. Resume with {which}, or export its weights and start from them as "
        "model.path in another run_dir"
    )


def _told(value: Mapping[str, JsonValue]) -> str:
    if not value["of"]:
        return str(value["value"])
    return f"{value['of']} (content {str(value['value'])[:12]})"


def _changes(
    there: JsonValue, here: JsonValue, prefix: str = ""
) -> Iterator[tuple[str, JsonValue, JsonValue]]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in sorted({*there, *here}):
            yield from _changes(there.get(key), here.get(key), f"{prefix}.{key}" if prefix else key)
    elif there != here:
        yield prefix, there, here
