"""What `convert` decides before it starts a rank: a refusal touches nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo import session
from megatron_dapo.checkpoint import state
from megatron_dapo.checkpoint.save import CheckpointError
from megatron_dapo.cli import convert, convert_rank
from megatron_dapo.cli.convert import convert_main
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.policy import model as policy_model
from megatron_dapo.resharding import load
from tests.unit.config.runs import DENSE, write_run


def options(folder: Path, *overrides: str) -> argparse.Namespace:
    return argparse.Namespace(
        hf_folder=folder / "model", out=folder / "out", overrides=list(overrides)
    )


def fake_ranks(monkeypatch: pytest.MonkeyPatch, code: int) -> list[Sequence[str]]:
    """Ranks that write one file and end with `code`; returns the commands they got."""
    commands: list[Sequence[str]] = []

    def launch(command: Sequence[str], world_size: int, logs: Path) -> int:
        commands.append(command)
        Path(command[command.index("--out") + 1], "weights").touch()
        return code

    monkeypatch.setattr(convert, "launch_ranks", launch)
    return commands


def test_the_shards_appear_at_once_with_the_configuration_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, hf=DENSE | {"torch_dtype": "float32"})
    commands = fake_ranks(monkeypatch, 0)
    assert convert_main(options(tmp_path, "parallel.tensor=2")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    assert str(tmp_path / ".out.tmp") in commands[0]
    config = load_config(tmp_path / "out" / "config.resolved.yaml")
    assert (config.run_dir, config.parallel.tensor) == (tmp_path / "out", 2)
    assert config.model.dtype == "float32"
    assert not (tmp_path / ".out.tmp").exists()


@pytest.mark.parametrize(
    ("stored", "overrides", "rounds"),
    [
        ("float16", (), True),
        ("float16", ("model.dtype=float32",), False),
        ("bfloat16", (), False),
        ("float32", ("model.dtype=bfloat16",), False),  # asked for
    ],
)
def test_weights_that_would_be_rounded_are_said_to_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stored: str,
    overrides: tuple[str, ...],
    rounds: bool,
) -> None:
    write_run(tmp_path, hf=DENSE | {"torch_dtype": stored})
    fake_ranks(monkeypatch, 0)
    assert convert_main(options(tmp_path, *overrides)) == 0
    said = capsys.readouterr().err
    assert ("rounds its numbers from 11 bits to 8. Give model.dtype=float32" in said) == rounds


def test_ranks_that_fail_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    before = sorted(tmp_path.iterdir())
    fake_ranks(monkeypatch, 1)
    assert convert_main(options(tmp_path)) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_an_impossible_layout_leaves_nothing(tmp_path: Path) -> None:
    write_run(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"parallel\.tensor=3: must divide"):
        convert_main(options(tmp_path, "parallel.tensor=3"))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["notes.txt", "checkpoints/step_00000005/manifest.json"])
def test_a_folder_that_holds_something_is_refused_untouched(tmp_path: Path, name: str) -> None:
    write_run(tmp_path)
    kept = tmp_path / "out" / name
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    with pytest.raises(ConfigError, match=r"exists: name a folder .* nothing is overwritten"):
        convert_main(options(tmp_path))
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == [kept]
    assert kept.read_text() == "{}"


def test_a_file_is_refused_and_an_empty_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    (tmp_path / "out").touch()
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        convert_main(options(tmp_path))
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    fake_ranks(monkeypatch, 0)
    assert convert_main(options(tmp_path)) == 0
    assert (tmp_path / "out" / "weights").is_file()


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, hf=DENSE | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ConfigError, match=r"quantization_config=.*bfloat16 or float32"):
        convert_main(options(tmp_path))


def test_the_folder_may_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "model").write_text(json.dumps(DENSE))
    with pytest.raises(ConfigError, match=r"model is a file; must be a Hugging Face model folder"):
        convert_main(options(tmp_path))


def test_a_rank_without_room_says_so_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise CheckpointError("rank 0: No space left on device")

    parallel = SimpleNamespace(left=0)
    parallel.destroy = lambda: setattr(parallel, "left", parallel.left + 1)
    monkeypatch.setattr(session, "join_ranks", lambda *_: parallel)
    monkeypatch.setattr(policy_model, "build_chunks", lambda *_: [])
    monkeypatch.setattr(load, "load_hf_weights", lambda *_: None)
    monkeypatch.setattr(state, "save_checkpoint", full)
    out = tmp_path / "out"
    assert convert_rank.main(["--config", str(write_run(tmp_path)), "--out", str(out)]) == 1
    assert capsys.readouterr().err == f"{out} is not written: rank 0: No space left on device\n"
    assert parallel.left == 1
