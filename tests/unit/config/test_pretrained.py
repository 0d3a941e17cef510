"""A config.json that transformers refuses is one message, whatever it raises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.cli.main import main
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.errors import EXIT_CONFIG
from megatron_dapo.config.pretrained import pretrained_config
from tests.unit.config.runs import DENSE, write_run

REFUSED = [
    {"rms_norm_eps": "x"},
    {"layer_types": ["full_attention"]},
    {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 4},
    {"dtype": "float99"},
    {"eos_token_id": "a"},
    {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "of the folder"},
]


def test_a_sound_one_is_read(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path))
    assert pretrained_config(config.model).num_hidden_layers == DENSE["num_hidden_layers"]


@pytest.mark.parametrize("changed", REFUSED, ids=lambda changed: next(iter(changed)))
def test_what_transformers_refuses_names_the_model(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    config = load_config(write_run(tmp_path, hf=DENSE | changed))
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}/model: transformers cannot use"):
        pretrained_config(config.model)


def test_commands_refuse_it_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path, hf=DENSE | {"layer_types": ["full_attention"]})
    model = json.loads((tmp_path / "model" / "config.json").read_text())
    assert len(model["layer_types"]) != model["num_hidden_layers"]
    for command in (["plan", file], ["convert", tmp_path / "model", tmp_path / "out"]):
        assert main([*map(str, command)]) == EXIT_CONFIG
        assert "transformers cannot use its config.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
