"""Commands that are pointed at the wrong thing say in one line what it is, and what to give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_dapo.cli.main import main
from megatron_dapo.config import load_config
from megatron_dapo.config.errors import EXIT_CONFIG
from megatron_dapo.config.load import save_resolved
from megatron_dapo.config.wrong_target import instead, run_of, what_is
from tests.unit.config.runs import write_run

EVAL = r"give a YAML file, a run directory, one of its checkpoints/step_N folders, or a Hugging"
EXPORT = r"must be a run directory \(with config\.resolved\.yaml\) or one of its checkpoints/step_N"
REPORT = r"a report needs the directory of a run that has logged a step"
REPLAY = r"give a folder RUN_DIR/dumps/step_N that a run wrote"
CONFIG = r"give the path of a YAML file"
WANTED = {"eval": EVAL, "export": EXPORT, "report": REPORT, "replay": REPLAY, "train": CONFIG}
KINDS = {
    "missing": "does not exist",
    "empty": "is an empty folder",
    "other": "is a folder of something else",
    "model": "is a Hugging Face folder",
    "run/checkpoints": "is the folder of a run's checkpoints",
    "run/checkpoints/step_00000005": "is one checkpoint of a run",
    "run/checkpoints/step_00000005/megatron": "is a folder of something else",
    "run/logs": "is an empty folder",
    "run/eval/start": "is the result of an evaluation",
    "run/metrics.jsonl": "is a file",
    "run/dumps/step_00000003": "is the dump of one update",
    "run": "is a run directory",
    "nowhere": "is a link to missing, which does not exist",
}
TAKEN = {
    "eval": {"model", "run", "run/checkpoints/step_00000005", "run/metrics.jsonl"},
    "export": {"run", "run/checkpoints/step_00000005"},
    "report": set(),
    "replay": {"run/dumps/step_00000003"},
    "train": {"missing", "nowhere", "run/metrics.jsonl"},
}
"""What a command may take, or refuses in other words."""


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """One path of every kind."""
    config = load_config(write_run(tmp_path))
    for name in ("empty", "other/src", "run/logs", "run/checkpoints/step_00000005/megatron"):
        (tmp_path / name).mkdir(parents=True)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000005"
    for file in (checkpoint / "manifest.json", checkpoint / "megatron" / "0.distcp"):
        file.write_text("{}")
    for folder, mark in (("eval/start", "report.json"), ("dumps/step_00000003", "rank_0.pt")):
        save_resolved(config, tmp_path / "run" / folder)
        (tmp_path / "run" / folder / mark).write_text("{}")
    save_resolved(config, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "nowhere").symlink_to("missing")
    return tmp_path


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_path_is_told_apart(places: Path, name: str) -> None:
    assert what_is(places / name) == KINDS[name]
    belongs = name == "run" or name.startswith("run/")
    assert run_of(places / name) == (places / "run" if belongs else None)


def test_the_way_to_the_run_is_named_from_anywhere_inside(places: Path) -> None:
    run = places / "run"
    assert instead(run / "logs") == f" It belongs to a run: give {run}"
    assert instead(run, "config.resolved.yaml").endswith(f"give {run / 'config.resolved.yaml'}")
    assert instead(run) == instead(places / "other") == ""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("command", WANTED)
def test_a_wrong_target_is_refused_in_one_line(
    places: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    if name in TAKEN[command]:
        pytest.skip("not wrong in this way")
    more = [str(places / "out")] if command == "export" else []
    assert main([command, str(places / name), *more]) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"configuration: \w+={re.escape(str(places / name))} ", line), line
    assert KINDS[name] in line and re.search(WANTED[command], line), line
    if name.startswith("run/") and command != "replay":
        assert f"It belongs to a run: give {places / 'run'}" in line
    assert not (places / "out").exists()


@pytest.mark.parametrize("command", ["eval", "export"])
def test_a_step_that_is_not_there_is_told_with_those_that_are(
    places: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    more = [str(places / "out")] if command == "export" else []
    missing = places / "run" / "checkpoints" / "step_00000099"
    assert main([command, str(missing), *more]) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{missing} does not exist; {missing.parent} holds" in line


@pytest.mark.parametrize("dumps", [True, False])
def test_dumps_of_the_run_are_named(
    places: Path, capsys: pytest.CaptureFixture[str], dumps: bool
) -> None:
    folder = places / "run" / "dumps"
    if not dumps:
        folder.rename(places / "moved")
    assert main(["replay", str(places / "run")]) == EXIT_CONFIG
    assert f"{folder} holds {'step_00000003' if dumps else 'none'}" in capsys.readouterr().err


FILES = {
    "rows.jsonl": ('{"prompt": "1 + 1"}\n', "is no configuration of a run; give its YAML file"),
    "two.jsonl": ('{"a": 1}\n{"a": 2}\n', "cannot be read as YAML: .*or give a YAML file"),
    "notes.txt": ("just text\n", "is no configuration of a run; give its YAML file"),
    "weights.safetensors": ("\x00\x01", "cannot be read as YAML"),
    "list.yaml": ("- a\n", "holds a list; it must hold `key: value` lines"),
}


@pytest.mark.parametrize("command", ["train", "eval", "plan"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    text, message = FILES[name]
    (tmp_path / name).write_text(text)
    assert main([command, str(tmp_path / name)]) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / name) in line and re.search(message, line), line


@pytest.mark.parametrize("command", ["export", "eval"])
def test_results_that_cannot_be_written_are_refused_before_anything_is_read(
    places: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    out = places / "taken" / "out"
    (places / "taken").write_text("")
    end = [str(out)] if command == "export" else ["--out", str(out)]
    target = places / ("model" if command == "eval" else "run")
    if command == "export":
        (target / "checkpoints" / "step_00000005" / "manifest.json").unlink()
    assert main([command, str(target), *end]) == EXIT_CONFIG
    assert f"OUT={out}: {places / 'taken'} is a file; a folder is needed" in capsys.readouterr().err


def test_a_file_without_permission_is_named(
    places: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert main(["train", str(places / "locked.yaml")]) == EXIT_CONFIG
    assert f"{places / 'locked.yaml'}: permission denied" in capsys.readouterr().err
