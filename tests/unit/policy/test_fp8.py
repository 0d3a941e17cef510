"""FP8 recipes: what is asked for runs, or is refused."""

from __future__ import annotations

import pytest
import torch
import transformers

from megatron_dapo import device
from megatron_dapo.config.schema import PrecisionConfig, RunConfig
from megatron_dapo.policy.fp8 import check_fp8, check_recipe_is_live, fp8_fields
from megatron_dapo.policy.model import transformer_config

RECIPES = ("blockwise", "tensorwise", "delayed", "mxfp8")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(device, "has_fp8", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_becomes_megatrons_configuration(recipe: str) -> None:
    config = RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "precision": {"fp8": recipe},
        }
    )
    transformer = transformer_config(config, transformers.Qwen2Config(), "te")
    assert (transformer.fp8, transformer.fp8_recipe) == ("e4m3", recipe)


def test_single_layers_can_stay_in_bf16() -> None:
    fields = fp8_fields(PrecisionConfig(fp8="blockwise", first_last_layers_bf16=True))
    assert fields["num_layers_at_start_in_bf16"] == fields["num_layers_at_end_in_bf16"] == 1


def test_without_fp8_nothing_is_set_and_nothing_is_checked() -> None:
    assert fp8_fields(PrecisionConfig()) == {}
    check_fp8(PrecisionConfig(), dtype="float32")


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "delayed"])
def test_hopper_runs_all_but_mxfp8(hopper: None, recipe: str) -> None:
    check_fp8(PrecisionConfig.model_validate({"fp8": recipe}), dtype="bfloat16")
    with pytest.raises(ValueError, match="Blackwell"):
        check_fp8(PrecisionConfig(fp8="mxfp8"), dtype="bfloat16")


@pytest.mark.parametrize(
    ("precision", "dtype", "message"),
    [
        ({"fp8": "blockwise"}, "float32", "needs model.dtype=bfloat16"),
        ({"fp8": "blockwise", "fp8_format": "hybrid"}, "bfloat16", "e4m3"),
        ({"fp8": "delayed", "first_last_layers_bf16": True}, "bfloat16", "single layers"),
        ({"fp8_param_gather": True}, "bfloat16", "need an FP8 recipe"),
    ],
)
def test_contradicting_options_are_refused(
    hopper: None, precision: dict[str, object], dtype: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_fp8(PrecisionConfig.model_validate(precision), dtype=dtype)


def test_an_older_chip_is_refused(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_fp8", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match="compute capability"):
        check_fp8(PrecisionConfig(fp8="tensorwise"), dtype="bfloat16")


def test_megatrons_silent_fall_back_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="would run in full precision"):
        check_recipe_is_live(PrecisionConfig(fp8="blockwise"), None)
    check_recipe_is_live(PrecisionConfig(fp8="blockwise"), object())
