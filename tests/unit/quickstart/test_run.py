import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.quickstart import run
from megatron_dapo.config import load_config
from megatron_dapo.observability.run_files import append_line

QUICKSTART = Path("examples/quickstart")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.ROOT)


def log_accuracy(run_dir: Path, *accuracy: float) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    for step, value in enumerate(accuracy):
        append_line(
            run_dir / "metrics.jsonl", {"step": 5 * step, "val-core/sums/acc/mean@1": value}
        )


def test_the_configuration_is_dapo_with_everything_on() -> None:
    config = load_config(QUICKSTART / "dapo.yaml")
    assert config.parallel.world_size == 2 and config.parallel.uses_sequence_parallel
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)
    assert (config.loss.ratio, config.loss.aggregation) == ("token", "token_mean")
    assert config.sampling.dynamic and config.reward.overlong_buffer_tokens == 8
    assert config.rollout.prompts_per_step * config.rollout.group_size == 4 * 64


def test_gspo_differs_in_its_loss_and_run_directory_only() -> None:
    dapo, gspo = (load_config(QUICKSTART / name) for name in ("dapo.yaml", "gspo.yaml"))
    same = gspo.model_copy(update={"run_dir": dapo.run_dir, "loss": dapo.loss})
    assert same == dapo and gspo.loss.ratio == "sequence"


@pytest.mark.parametrize(("after", "code"), [(0.92, 0), (0.5, 1), (0.8, 1)])
def test_the_summary_judges_the_last_held_out_accuracy(
    after: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(QUICKSTART / "dapo.yaml", [f"run_dir={tmp_path}"])
    log_accuracy(tmp_path, 0.28, 0.7, after)
    assert run.summarise(config) == code
    said = capsys.readouterr().out
    assert f"held-out accuracy 28 % before, {100 * after:.0f} % after" in said
    assert ("expected more than 80 %" in said) == bool(code)


def test_a_run_without_evaluation_cannot_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(QUICKSTART / "dapo.yaml", [f"run_dir={tmp_path}"])
    append_line(tmp_path / "metrics.jsonl", {"step": 1, "reward/mean": 0.5})
    assert run.summarise(config) == 1
    assert "was not measured" in capsys.readouterr().out


def test_it_prepares_once_and_trains_through_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def fake(command: list[str]) -> SimpleNamespace:
        commands.append(command[1:])
        if "train" in command:
            log_accuracy(tmp_path / "run", 0.28, 0.92)
        else:
            (tmp_path / "start").mkdir()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", fake)
    overrides = [f"model.path={tmp_path}/start/model", f"run_dir={tmp_path}/run"]
    assert run.main(overrides) == 0
    assert run.main(overrides) == 0
    prepared = [str(run.PREPARE), "--folder", f"{tmp_path}/start"]
    trained = ["-m", "megatron_dapo.cli.main", "train", str(run.CONFIG), *overrides]
    assert commands == [prepared, trained, trained]


def test_a_failed_training_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command: SimpleNamespace(returncode=78))
    assert run.main([f"model.path={tmp_path}/model", f"run_dir={tmp_path}/run"]) == 78
    assert "training failed with exit code 78" in capsys.readouterr().out
