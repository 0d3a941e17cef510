"""Prompts, tokenizer and reward plug-in are refused as configuration, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.cli import launch
from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.rollout import inputs
from megatron_dapo.rollout.inputs import RolloutInputs
from tests.unit.config.runs import DENSE, write_run
from tests.unit.data.word_tokenizer import WordTokenizer

ROW = json.dumps({"prompt": "1 + 1", "reward_model": {"ground_truth": "2"}})


@pytest.fixture(autouse=True)
def word_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "load_tokenizer", lambda path, **options: WordTokenizer())


def run(folder: Path, *overrides: str, rows: str = ROW) -> RunConfig:
    file = write_run(folder, hf=DENSE | {"eos_token_id": 9})
    (folder / "train.jsonl").write_text(rows + "\n")
    return load_config(file, ["data.prompt_format=plain", *overrides])


def test_everything_is_read_once(tmp_path: Path) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(f"{ROW}\n{ROW.replace('1 + 1', '0 + 2')}\n")
    found = RolloutInputs.read(
        run(
            tmp_path,
            f"data.heldout={heldout}",
            "evaluation.max_prompts=1",
            "reward.plugin=tests.unit.reward.plugins:echo",
        )
    )
    assert [prompt.text for prompt in found.train.prompts] == ["1 + 1"]
    (heldout_set,) = found.heldout
    assert heldout_set.name == "heldout"
    assert [prompt.text for prompt in heldout_set.prompts] == ["1 + 1"]
    assert found.stop_token_ids == (0, 9)


BROKEN = [
    ((), "not json", "line 1: json"),
    ((), json.dumps({"prompt": "x"}), "line 1: answer"),
    (("data.max_prompt_tokens=2",), ROW, "no prompt is left"),
    (("reward.plugin=no_such_module:grade",), ROW, "cannot import no_such_module"),
    (("reward.plugin=tests.unit.reward.plugins:absent",), ROW, "has no absent"),
    (("reward.plugin=tests.unit.reward.bad_import:grade",), ROW, "ZeroDivisionError"),
    (("reward.plugin=tests.unit.reward.fatal_import:grade",), ROW, "ended with code 3"),
]


@pytest.mark.parametrize(("overrides", "rows", "message"), BROKEN)
def test_what_cannot_be_used_starts_no_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    rows: str,
    message: str,
) -> None:
    monkeypatch.setattr(launch, "launch_ranks", lambda *arguments: pytest.fail("started"))
    config = run(tmp_path, *overrides, rows=rows)
    with pytest.raises(ConfigError, match=message):
        launch.launch_training(config)
    assert not config.run_dir.exists()
