"""Small configurations on the spot: a base that is sound, and model folders without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from megatron_dapo.config import RunConfig

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
SOUND: dict[str, dict[str, object]] = {
    "data": {"max_prompt_tokens": 32},
    "training": {"steps": 40, "responses_per_update": 16, "tokens_per_micro_batch": 1024},
    "rollout": {"prompts_per_step": 8, "group_size": 8, "max_response_tokens": 64},
    "reward": {"overlong_buffer_tokens": 16},
}

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""The smallest whole safetensors file."""


def write_run(folder: Path, *, hf: Mapping[str, object] = DENSE, weights: bool = True) -> Path:
    """A sound run in `folder`: run.yaml, a model folder and prompts. Returns run.yaml."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(dict(hf)))
    if weights:
        (model / "model.safetensors").write_bytes(NO_TENSORS)
        (model / "tokenizer.json").write_text("{}")
        (folder / "train.jsonl").write_text("{}\n")
    tree = SOUND | {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model)},
        "data": {"train": str(folder / "train.jsonl"), **SOUND["data"]},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def write_model(folder: Path) -> Path:
    """A model folder of nothing but its shape."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(DENSE))
    return folder


def make_config(**sections: Mapping[str, object]) -> RunConfig:
    """A sound configuration with some sections' keys changed; needs no files."""
    tree: dict[str, object] = {"run_dir": "run", "model": {"path": "model"}, "device": "cpu"}
    tree["data"] = {"train": "train.jsonl", **SOUND["data"]}
    for name in ("training", "rollout", "reward"):
        tree[name] = SOUND[name]
    for name, changes in sections.items():
        known = tree.get(name, {})
        assert isinstance(known, dict), f"{name} is not a section"
        tree[name] = {**known, **changes}
    return RunConfig.model_validate(tree)
