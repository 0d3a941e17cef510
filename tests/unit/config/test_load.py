"""Files, inheritance, overrides, and what is saved."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.load import RESOLVED_FILE, exact_yaml, resolved_yaml, save_resolved
from megatron_dapo.config.versions import SCHEMA_VERSION
from tests.unit.config.runs import make_config, write_run


def test_overrides_win_over_the_file_from_left_to_right(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path), ["optimizer.lr=1e-3", "optimizer.lr=2e-4", "seed=7"])
    assert (config.optimizer.lr, config.seed) == (2e-4, 7)
    assert config.rollout.group_size == 8


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("rollout.endpoints=[unix:/a,unix:/b]", ("unix:/a", "unix:/b")),
        ("rollout.max_engine_tokens=null", None),
        ("rollout.max_engine_tokens=", None),
        ("rollout.logprobs=raw", "raw"),
        ("rollout.top_p=1", 1.0),
    ],
)
def test_override_values_are_yaml(tmp_path: Path, override: str, value: object) -> None:
    config = load_config(write_run(tmp_path), [override])
    name = override.partition("=")[0].partition(".")[2]
    assert config.model_dump()["rollout"][name] == value


def test_scientific_notation_without_a_dot_is_a_number(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    file.write_text(file.read_text() + "optimizer:\n  lr: 1e-6\n")
    assert load_config(file).optimizer.lr == 1e-6


def test_a_file_changes_only_what_it_names_of_its_base(tmp_path: Path) -> None:
    base = load_config(write_run(tmp_path))
    child = tmp_path / "variants" / "child.yaml"
    child.parent.mkdir()
    child.write_text("base: ../run.yaml\nloss:\n  clip_high: 0.2\n")
    config = load_config(child)
    assert config.loss.clip_high == 0.2
    assert config.model_copy(update={"loss": base.loss}) == base


def test_inheritance_has_one_level(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "child.yaml").write_text("base: run.yaml\n")
    (tmp_path / "grandchild.yaml").write_text("base: child.yaml\n")
    with pytest.raises(ConfigError, match="one level"):
        load_config(tmp_path / "grandchild.yaml")


def test_an_unknown_key_of_the_base_names_the_base(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    file.write_text(file.read_text() + "loss: {clip_hihg: 0.3}\n")
    (tmp_path / "child.yaml").write_text("base: run.yaml\n")
    with pytest.raises(ConfigError, match=r"clip_hihg in run\.yaml \(base of"):
        load_config(tmp_path / "child.yaml")


def test_paths_are_relative_to_the_current_directory_and_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = load_config(file, ["data.train=prompts/train.parquet", "run_dir=~/runs/a"])
    assert config.data.train == tmp_path / "prompts/train.parquet"
    assert config.run_dir == Path.home() / "runs/a"


def test_environment_variables_fill_in_and_fall_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_run(tmp_path)
    monkeypatch.setenv("SOME_MODEL", str(tmp_path / "other"))
    monkeypatch.delenv("UNSET_MODEL", raising=False)
    found = load_config(file, ["model.path=${oc.env:SOME_MODEL}"])
    default = load_config(file, [f"model.path=${{oc.env:UNSET_MODEL,{tmp_path}}}"])
    assert (found.model.path, default.model.path) == (tmp_path / "other", tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path.*UNSET_MODEL"):
        load_config(file, ["model.path=${oc.env:UNSET_MODEL}"])


def test_the_saved_configuration_loads_to_the_same_run(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path), ["loss.dual_clip=10", "rollout.endpoints=[unix:/a]"])
    saved = save_resolved(config, tmp_path / "run")
    assert load_config(saved) == config


def test_versions_are_saved_beside_it(tmp_path: Path) -> None:
    save_resolved(load_config(write_run(tmp_path)), tmp_path / "run")
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["schema"] == SCHEMA_VERSION
    assert versions["torch"].startswith("2.13")
    assert "transformer-engine" in versions


def test_no_secret_reaches_the_saved_files(tmp_path: Path) -> None:
    secret = "hunter2canary"
    config = make_config(
        logging={"wandb_project": f"https://me:{secret}@example.org/p"},
        data={"train": f"s3://key:{secret}@bucket/train.jsonl"},
        rollout={"endpoints": [f"http://u:{secret}@127.0.0.1:1"]},
        reward={"plugin": "hf_" + secret * 3},
    )
    save_resolved(config, tmp_path)
    for file in tmp_path.iterdir():
        assert secret not in file.read_text(), f"{file.name} holds a secret"


@pytest.mark.parametrize(
    "override",
    [
        "training.steps=true",
        "training.steps=false",
        "optimizer.lr=true",
        "seed=true",
        "parallel.virtual_pipeline=true",
        "rollout.max_engine_tokens=false",
        "resharding.probe_tolerance=true",
    ],
)
def test_a_switch_is_no_number(tmp_path: Path, override: str) -> None:
    key, _, value = override.partition("=")
    seen = str(value == "true")
    with pytest.raises(ConfigError, match=rf"{key}={seen}: .*must not be {value}\. \w"):
        load_config(write_run(tmp_path), [override])


@pytest.mark.parametrize("override", ["training.deterministic=false", "logging.wandb=true"])
def test_a_switch_where_one_belongs_is_read(tmp_path: Path, override: str) -> None:
    section, _, name = override.partition("=")[0].partition(".")
    config = load_config(write_run(tmp_path), [override])
    assert getattr(getattr(config, section), name) is override.endswith("true")


def test_processes_of_the_run_get_paths_that_look_like_secrets_as_they_are(tmp_path: Path) -> None:
    name = "sk-" + "a1" * 20
    config = load_config(write_run(tmp_path), [f"run_dir={tmp_path / name}"])
    assert name not in resolved_yaml(config)
    handed_over = tmp_path / "handed_over.yaml"
    handed_over.write_text(exact_yaml(config))
    assert load_config(handed_over) == config


@pytest.mark.parametrize(
    "name", ["hf_Qwen25Math7BInstruct", "sk-learn-baseline-run", "ghp_of_may_2026_a"]
)
def test_a_folder_that_only_begins_like_a_token_is_told(tmp_path: Path, name: str) -> None:
    config = make_config().model_copy(update={"run_dir": tmp_path / name})
    save_resolved(config, tmp_path / name)
    assert load_config(tmp_path / name / RESOLVED_FILE).run_dir == tmp_path / name


def test_a_full_disk_leaves_the_configuration_that_was_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    saved = save_resolved(config, tmp_path)
    text = saved.read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_resolved(config, tmp_path)
    monkeypatch.undo()
    assert saved.read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == [RESOLVED_FILE, "versions.json"]
