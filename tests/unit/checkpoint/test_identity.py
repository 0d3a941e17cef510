"""A run goes on with its own seed, prompts and model; other changes are told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_dapo.checkpoint.header import HEADER_FILE, Header, state_files
from megatron_dapo.checkpoint.identity import check_identity, model_fingerprint, run_identity
from megatron_dapo.config import ConfigError, RunConfig, load_config
from tests.unit.config.runs import write_run


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(write_run(tmp_path), [])


def saved(folder: Path, config: RunConfig) -> Path:
    """A checkpoint as far as it tells whose it is."""
    folder.mkdir()
    (folder / HEADER_FILE).write_text(Header(3, {}, 1).text())
    for name, content in state_files(run_identity(config, "prompts")).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_the_same_run_goes_on_without_a_word(
    tmp_path: Path, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    check_identity(saved(tmp_path / "step", config), run_identity(config, "prompts"))
    assert caplog.text == ""


def test_each_of_seed_prompts_and_model_is_refused_with_both_values(
    tmp_path: Path, config: RunConfig
) -> None:
    checkpoint = saved(tmp_path / "step", config)
    other = config.model_copy(update={"seed": 5})
    weights = config.model.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    with pytest.raises(ConfigError) as refused:
        check_identity(checkpoint, run_identity(other, "other prompts"))
    seed, data, model = refused.value.problems
    assert seed.startswith("seed=5: ") and "was trained with 0." in seed
    assert data.startswith("data.train=") and "(content other prompt)" in data
    assert "(content prompts)" in data
    assert model.startswith("model.path=") and str(config.model.path) in model
    assert len(set(re.findall(r"content (\w{12})\)", model))) == 2


def test_other_keys_may_change_and_are_named(
    tmp_path: Path, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = saved(tmp_path / "step", config)
    section = config.optimizer.model_copy(update={"lr": 2e-6})
    training = config.training.model_copy(update={"steps": 999})
    other = config.model_copy(update={"optimizer": section, "training": training})
    check_identity(checkpoint, run_identity(other, "prompts"))
    assert "optimizer.lr was 1e-06, it is 2e-06 from here on" in caplog.text
    assert "999" not in caplog.text


def test_another_kind_of_optimizer_is_refused(tmp_path: Path, config: RunConfig) -> None:
    checkpoint = saved(tmp_path / "step", config)
    section = config.parallel.model_copy(update={"distributed_optimizer": False})
    other = config.model_copy(update={"parallel": section})
    told = r"^parallel\.distributed_optimizer=False: .* was trained with True"
    with pytest.raises(ConfigError, match=told):
        check_identity(checkpoint, run_identity(other, "prompts"))


@pytest.mark.parametrize("sharded", [True, False])
def test_another_dtype_is_refused_where_the_optimizer_cannot_take_it(
    tmp_path: Path, config: RunConfig, sharded: bool
) -> None:
    def in_dtype(dtype: str) -> RunConfig:
        parallel = config.parallel.model_copy(update={"distributed_optimizer": sharded})
        model = config.model.model_copy(update={"dtype": dtype})
        return config.model_copy(update={"parallel": parallel, "model": model})

    checkpoint = saved(tmp_path / "step", in_dtype("float32"))
    now = run_identity(in_dtype("bfloat16"), "prompts")
    if sharded:
        check_identity(checkpoint, now)
        return
    with pytest.raises(ConfigError, match=r"^model\.dtype=bfloat16: .* was trained with float32, "):
        check_identity(checkpoint, now)


@pytest.mark.parametrize(("before", "now"), [(1, 2), (4, 1)])
def test_experts_in_another_number_of_optimizers_are_refused(
    tmp_path: Path, config: RunConfig, before: int, now: int
) -> None:
    def with_expert(size: int) -> RunConfig:
        section = config.parallel.model_copy(update={"expert": size})
        return config.model_copy(update={"parallel": section})

    checkpoint = saved(tmp_path / "step", with_expert(before))
    told = rf"^parallel\.expert={now}: .* was trained with {before}, .*Resume with .*={before}"
    with pytest.raises(ConfigError, match=told):
        check_identity(checkpoint, run_identity(with_expert(now), "prompts"))


def test_experts_may_be_cut_otherwise(
    tmp_path: Path, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def with_expert(size: int) -> RunConfig:
        section = config.parallel.model_copy(update={"expert": size})
        return config.model_copy(update={"parallel": section})

    checkpoint = saved(tmp_path / "step", with_expert(2))
    check_identity(checkpoint, run_identity(with_expert(4), "prompts"))
    assert "parallel.expert was 2, it is 4 from here on" in caplog.text


def test_weights_alone_belong_to_no_run(tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / HEADER_FILE).write_text(Header(0, {}, 0).text())
    check_identity(tmp_path, run_identity(config, "prompts"))


def test_another_format_is_refused_by_its_number(tmp_path: Path, config: RunConfig) -> None:
    checkpoint = saved(tmp_path / "step", config)
    header = json.loads((checkpoint / HEADER_FILE).read_text())
    (checkpoint / HEADER_FILE).write_text(json.dumps(header | {"format": 99}))
    with pytest.raises(ConfigError, match=r"step was made by a newer .* format=99, .* format 2"):
        check_identity(checkpoint, run_identity(config, "prompts"))


def test_a_moved_model_is_the_same_and_one_changed_in_the_middle_is_not(tmp_path: Path) -> None:
    for name in ("here", "there", "changed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"a": 1}')
        content = bytearray(range(250)) * 4000
        if name == "changed":
            content[len(content) // 2 :] = content[: len(content) // 2]
            content[400_000:600_000] = bytes(200_000)
        (folder / "model.safetensors").write_bytes(content)
    here, there, changed = (
        model_fingerprint(tmp_path / name) for name in ("here", "there", "changed")
    )
    assert here == there != changed
