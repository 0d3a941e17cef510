"""The command: exit codes, one clear message, and how early a bad configuration is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dapo.cli.main import build_parser, main, parse
from megatron_dapo.config.errors import RunFailed
from megatron_dapo.data import prepare
from tests.conftest import REPOSITORY
from tests.unit.config.runs import DENSE, write_run

OVERRIDES = [
    ("loss.clip_hihg=0.3", "Did you mean loss.clip_high?"),
    ("group_size=4", "Did you mean rollout.group_size?"),
    ("loss.clip_low=-1", "loss.clip_low=-1: input should be greater than or equal to"),
    ("model.dtype=fp16", "model.dtype='fp16': input should be 'float32' or 'bfloat16'"),
    ("parallel.tensor=two", "parallel.tensor='two'"),
    ("parallel.tensor=1.5", "parallel.tensor=1.5"),
    ("optimizer.lr=.nan", "optimizer.lr=nan"),
    ("optimizer.lr=.inf", "optimizer.lr=inf"),
    ("optimizer.lr=0", "optimizer.lr=0"),
    ("rollout=3", "rollout=3: must be a section"),
    ("rollout.endpoints=[1]", "rollout.endpoints=1"),
    ("seed=-1", "seed=-1"),
    ("noequals", "must be section.key=value"),
    ("=3", "must be section.key=value"),
    ("loss.clip_low=[1", "cannot be read as YAML"),
    ("model.path=${oc.env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"),
    ("model.path=/nonexistent/model", "model.path=/nonexistent/model does not exist"),
    ("data.train=/nonexistent.jsonl", "data.train=/nonexistent.jsonl: no such file"),
    ("data.heldout=/nonexistent.jsonl", "data.heldout=/nonexistent.jsonl: no such file"),
    ("data.train=/etc/hostname", "must be a .parquet or .jsonl file"),
    ("model.tokenizer=/nonexistent/t", "model.tokenizer=/nonexistent/t: no such file"),
    ("run_dir=/etc/hostname", "run_dir=/etc/hostname: /etc/hostname is a file"),
    ("run_dir=/etc/hostname/run", "/etc/hostname is a file; a folder is needed"),
    ("logging.wandb=true", "logging.wandb=true: wandb is not installed"),
    ("logging.wandb_api_key=hunter2canary", "environment or netrc"),
    ("parallel.tensor=3", "parallel.tensor=3: must divide"),
    ("parallel.pipeline=3", "parallel.pipeline=3: must divide the model's 4 layers"),
    ("rollout.temperature=0", "rollout.temperature=0"),
    ("rollout.top_k=50", "rollout.top_k=50"),
    ("rollout.top_p=0.5", "rollout.top_p=0.5"),
    ("rollout.max_engine_tokens=90", "rollout.max_engine_tokens=90"),
    ("training.responses_per_update=12", "training.responses_per_update=12"),
    ("reward.overlong_buffer_tokens=100", "reward.overlong_buffer_tokens=100"),
    ("loss.aggregation=constant", "loss.constant_tokens is not set"),
    ("loss.ratio=sequence", "use 3e-4 and 4e-4"),
    ("precision.fp8=blockwise", "precision.fp8=blockwise"),
    ("device=cuda", "device=cuda: no CUDA device is visible"),
]


@pytest.fixture(autouse=True)
def no_gpu_and_no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers on every machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(sys.modules, "wandb", None)


@pytest.fixture
def never_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if training is started."""
    monkeypatch.setitem(sys.modules, "megatron_dapo.cli.launch", None)


@pytest.mark.usefixtures("never_launched")
@pytest.mark.parametrize(("override", "message"), OVERRIDES)
def test_a_bad_configuration_is_refused_with_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    file = write_run(tmp_path)
    code = main(["train", str(file), override])
    answer = capsys.readouterr().err
    assert code == 78
    assert message.lower() in answer.lower()
    assert "hunter2canary" not in answer
    assert "pydantic" not in answer
    assert "Traceback" not in answer


def no_file(folder: Path) -> Path:
    return folder / "absent.yaml"


def broken_yaml(folder: Path) -> Path:
    file = write_run(folder)
    file.write_text(file.read_text() + "loss: {clip_low: [1\n")
    return file


def duplicate_key(folder: Path) -> Path:
    file = write_run(folder)
    file.write_text(file.read_text() + "seed: 1\nseed: 2\n")
    return file


def a_list(folder: Path) -> Path:
    file = folder / "list.yaml"
    file.write_text("- 1\n")
    return file


def nothing_in_it(folder: Path) -> Path:
    file = folder / "empty.yaml"
    file.write_text("")
    return file


def no_weights(folder: Path) -> Path:
    file = write_run(folder)
    (folder / "model" / "model.safetensors").unlink()
    return file


def half_downloaded(folder: Path) -> Path:
    file = write_run(folder)
    index = '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    (folder / "model" / "model.safetensors.index.json").write_text(index)
    return file


def no_tokenizer(folder: Path) -> Path:
    file = write_run(folder)
    (folder / "model" / "tokenizer.json").unlink()
    return file


def no_config_json(folder: Path) -> Path:
    file = write_run(folder)
    (folder / "model" / "config.json").unlink()
    return file


def config_json_is_no_json(folder: Path) -> Path:
    file = write_run(folder)
    (folder / "model" / "config.json").write_text("version https://git-lfs")
    return file


def no_layers(folder: Path) -> Path:
    return write_run(folder, hf=DENSE | {"num_hidden_layers": "many"})


FILES: list[tuple[Callable[[Path], Path], str]] = [
    (no_file, "absent.yaml does not exist"),
    (broken_yaml, "cannot be read as YAML"),
    (duplicate_key, "duplicate key seed"),
    (a_list, "holds a list"),
    (nothing_in_it, "empty.yaml is empty: "),
    (no_weights, "holds no .safetensors weights"),
    (half_downloaded, "1 of 2 weight files are missing, first model-2.safetensors"),
    (no_tokenizer, "holds none of tokenizer.json"),
    (no_config_json, "has no config.json"),
    (config_json_is_no_json, "is not JSON"),
    (no_layers, "num_hidden_layers='many'"),
]


@pytest.mark.usefixtures("never_launched")
@pytest.mark.parametrize(("make", "message"), FILES)
def test_a_bad_file_is_refused_by_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], Path],
    message: str,
) -> None:
    assert main(["train", str(make(tmp_path))]) == 78
    answer = capsys.readouterr().err
    assert message in answer
    assert answer.count("configuration: ") == 1


HEAVY = ("torch", "transformers", "megatron", "vllm")
WATCHED_RUN = """
import sys
from megatron_dapo.cli.main import main
code = main({arguments!r})
heavy = [name for name in {heavy!r} if name in sys.modules]
sys.exit(100 if heavy else code)
"""


@pytest.mark.parametrize(
    ("override", "code"), [("loss.clip_hihg=1", 78), ("parallel.tensor=3", 78), ("seed=3", 0)]
)
def test_nothing_heavy_is_imported_to_check_a_configuration(
    tmp_path: Path, override: str, code: int
) -> None:
    arguments = ["train", str(write_run(tmp_path)), override, "--dry-run"]
    script = WATCHED_RUN.format(arguments=arguments, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == code, done.stderr


def test_the_command_is_installed_and_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dapo.cli.main", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for command in ("train", "convert", "export", "report", "doctor"):
        assert command in done.stdout


def test_exit_codes_of_training_pass_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_dapo.cli import launch

    monkeypatch.setattr(launch, "launch_training", lambda config: 70 + config.seed)
    file = str(write_run(tmp_path))
    assert [main(["train", file, f"seed={seed}"]) for seed in (5, 8)] == [75, 78]


def test_ctrl_c_before_the_ranks_start_is_answered_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_dapo.cli import launch

    def interrupted(_config: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "launch_training", interrupted)
    assert main(["train", str(write_run(tmp_path))]) == 130


def test_a_run_without_a_step_has_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 78
    assert f"RUN_DIR={tmp_path}" in capsys.readouterr().err


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args([])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "FILE", "--dry-run", "a.b=1", "c.d=-2"],
        ["train", "--dry-run", "FILE", "a.b=1", "c.d=-2"],
        ["train", "FILE", "a.b=1", "--dry-run", "c.d=-2"],
        ["train", "FILE", "a.b=1", "c.d=-2", "--dry-run"],
    ],
)
def test_a_flag_stands_anywhere_among_the_overrides(words: list[str]) -> None:
    options = parse(build_parser(), words)
    assert options.dry_run
    assert options.config == Path("FILE")
    assert options.overrides == ["a.b=1", "c.d=-2"]


@pytest.mark.parametrize("word", ["--dryrun", "--seed=3", "overide"])
def test_a_word_that_is_neither_flag_nor_override_is_refused(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(build_parser(), ["train", "FILE", "--dry-run", word])
    assert raised.value.code == 2
    assert word in capsys.readouterr().err


def test_a_command_without_overrides_refuses_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(build_parser(), ["doctor", "a.b=1"])
    assert "a.b=1" in capsys.readouterr().err


FAILURES = [
    (RunFailed("no checkpoint can be trusted"), "no checkpoint can be trusted\n"),
    (OSError(28, "No space left on device", "out"), "No space left on device: 'out'. Make room, "),
    (OSError(30, "Read-only file system", "out"), "Read-only file system: 'out'. Make room, "),
]


@pytest.mark.parametrize(("failure", "told"), FAILURES, ids=str)
def test_what_a_sound_program_meets_is_one_message_of_any_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: Exception,
    told: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    monkeypatch.setattr(prepare, "write_rows", fail)
    command = ["data", "prepare", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "o.jsonl")]
    assert main(command) == 1
    answer = capsys.readouterr().err
    assert told in answer and "Traceback" not in answer


def test_other_errors_of_the_system_keep_their_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "ours")

    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    monkeypatch.setattr(prepare, "write_rows", fail)
    with pytest.raises(FileNotFoundError):
        main(["data", "prepare", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "o.jsonl")])
