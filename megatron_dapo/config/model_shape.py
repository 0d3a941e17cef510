"""The numbers of a Hugging Face config.json that a run is checked and planned against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megatron_dapo.config.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer; `experts` is 0 for a dense model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    tied_embeddings: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    custom_code: bool = False

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, object]) -> ModelShape:
        """Read a parsed config.json.

        Raises:
            ConfigError: a number is missing or is not a positive whole number.
        """
        heads = _number(hf_config, "num_attention_heads")
        hidden = _number(hf_config, "hidden_size")
        return cls(
            layers=_number(hf_config, "num_hidden_layers"),
            hidden=hidden,
            ffn=_number(hf_config, "intermediate_size"),
            heads=heads,
            kv_heads=_number(hf_config, "num_key_value_heads", heads),
            head_dim=_number(hf_config, "head_dim", max(hidden // heads, 1)),
            vocab=_number(hf_config, "vocab_size"),
            max_positions=_number(hf_config, "max_position_embeddings"),
            tied_embeddings=hf_config.get("tie_word_embeddings") is True,
            experts=_number(hf_config, "num_experts", _number(hf_config, "num_local_experts", 0)),
            experts_per_token=_number(hf_config, "num_experts_per_tok", 0),
            expert_ffn=_number(hf_config, "moe_intermediate_size", 0),
            custom_code="auto_map" in hf_config,
        )

    @property
    def is_moe(self) -> bool:
        return self.experts > 0


def _number(hf_config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = hf_config.get(name)
    if value is None and default is not None:
        return default
    least = 0 if default == 0 else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"model.path: its config.json has {name}={value!r}; must be a positive whole number. "
            "Give the folder of a decoder-only transformer in Hugging Face form."
        )
    return value


def vocabulary_of(folder: Path) -> int:
    """Token ids that a model has, whether its tokenizer uses them or not."""
    return ModelShape.from_hf(read_hf_config(folder)).vocab


def read_hf_config(folder: Path) -> dict[str, object]:
    """The parsed config.json of a model folder.

    Raises:
        ConfigError: no such folder or file, or it is not JSON.
    """
    file = folder / "config.json"
    if not file.is_file():
        state = "does not exist"
        if folder.exists():
            state = "has no config.json" if folder.is_dir() else "is a file"
        raise ConfigError(
            f"model.path={folder} {state}; must be a Hugging Face model folder. "
            "Download the model there, or set model.path."
        )
    try:
        parsed = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not JSON ({error}). Fetch it again.") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"model.path: {file} must hold a JSON object, not {parsed!r:.40}")
    return cast(dict[str, object], parsed)
