"""The real wandb, without its service or with one on this machine that does what a test wants."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_dapo.config.versions import is_installed
from megatron_dapo.observability import wandb_sink
from megatron_dapo.observability.run_files import read_metrics, read_run_record
from megatron_dapo.observability.sinks import Sinks
from megatron_dapo.observability.wandb_process import Sent, descendants
from megatron_dapo.observability.wandb_sink import WandbSink, wandb_environment
from tests.conftest import REPOSITORY
from tests.logging_services import recorded
from tests.unit.observability.test_sinks import group, run_config
from tests.unit.observability.wandb_service import Behaviour, running_service

real = pytest.mark.skipif(not is_installed("wandb"), reason="wandb is not installed")
KEY = "c0ffee" * 6 + "cafe"
CANARY = "hunter2canary"
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def nothing_but_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key, no network, an empty home; afterwards no process and no file elsewhere is left."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    scratch = tempfile.TemporaryDirectory(prefix="w", dir="/tmp")  # short: sockets lie in there
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tempfile, "tempdir", scratch.name)
    with scratch:
        yield
        until(lambda: not wandb_processes())
        assert [*Path(scratch.name).glob("megatron_dapo*")] == []
    assert [*(tmp_path / "home").rglob("*")] == []


def wandb_processes() -> list[psutil.Process]:
    """Living ones that this process has started, or that they have."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def log_steps(sinks: Sinks, steps: range) -> None:
    for step in steps:
        sinks.log(step, {"reward/mean": step / 8, "actor/grad_norm": float("nan")})
        sinks.log_samples(step, [group("a")])


def sent_step(run_dir: Path) -> int:
    return Sent.read(run_dir).step


def send(arguments: str, port: int) -> None:
    """Type `wandb ARGUMENTS`."""
    environment = os.environ | {
        "WANDB_MODE": "online",
        "WANDB_API_KEY": KEY,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CACHE_DIR": tempfile.gettempdir(),
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
    }
    command = f"{sys.executable} -m wandb {arguments}"
    subprocess.run(command, shell=True, env=environment, check=True, timeout=PATIENCE)


def steps_of(rows: list[dict[str, object]], name: str) -> list[object]:
    return [row["step"] for row in rows if name in row]


@real
def test_a_run_goes_on_in_the_same_one_each_step_once_and_rising(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    sinks = Sinks.open(run_config(run_dir, wandb=True))
    log_steps(sinks, range(1, 5))
    sinks.close()
    resumed = Sinks.open(run_config(run_dir, wandb=True))  # from a checkpoint of step 2
    log_steps(resumed, range(3, 7))
    resumed.close(complete=True)
    assert not sinks.failures and not resumed.failures
    rows = recorded(run_dir)
    assert steps_of(rows, "reward/mean") == [1, 2, 3, 4, 5, 6]
    assert steps_of(rows, "samples/_type") == [1, 2, 3, 4, 5, 6]
    assert [row["reward/mean"] for row in rows if "reward/mean" in row][-1] == 0.75
    identity = read_run_record(run_dir)["wandb_id"]
    folders = [path.name for path in run_dir.glob("wandb/offline-run-*")]
    assert len(folders) == 2 and all(name.endswith(identity) for name in folders)
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.endswith(f"send it with: wandb sync {run_dir}/wandb/offline-run-*-{identity}")
    with running_service("works") as service:
        send(said.partition(": wandb ")[2], service.port)
    assert steps_of(service.history, "reward/mean") == [1, 2, 3, 4, 5, 6]
    assert service.runs == {identity}


@real
def test_no_secret_is_in_any_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    sinks = Sinks.open(run_config(tmp_path / "run", wandb=True))
    (process,) = psutil.Process().children()
    assert CANARY not in " ".join([*process.cmdline(), *process.environ().values()])
    log_steps(sinks, range(1, 3))
    sinks.close(complete=True)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for secret in (KEY, CANARY, "hunter2"):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


@real
@pytest.mark.parametrize("behaviour", ["silent", "broken", "refuses", None])
def test_a_service_that_is_down_costs_nothing_and_the_run_is_on_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    behaviour: Behaviour | None,
) -> None:
    monkeypatch.setattr(wandb_sink, "ANSWER_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with running_service(behaviour or "broken") as service:
        port = service.port if behaviour else 9
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        sinks = Sinks.open(run_config(tmp_path / "run", wandb=True))
        started = time.monotonic()
        log_steps(sinks, range(1, 101))
        assert time.monotonic() - started < 10.0
        sinks.close(complete=True)
    assert not sinks.failures
    assert steps_of(recorded(tmp_path / "run"), "reward/mean") == [*range(1, 101)]
    said = capfd.readouterr().err
    assert said.count("Training goes on; the run is recorded on disk.") == 1
    assert said.count("wandb sync") == 1


@real
def test_a_service_gets_every_step_and_a_resumed_run_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with running_service("works") as service:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{service.port}")
        for steps in (range(1, 4), range(3, 6)):
            sinks = Sinks.open(run_config(tmp_path / "run", wandb=True))
            log_steps(sinks, steps)
            until(lambda last=steps[-1]: sent_step(tmp_path / "run") == last)
            sinks.close()
            assert not sinks.failures
    assert steps_of(service.history, "reward/mean") == [1, 2, 3, 4, 5]
    assert steps_of(service.history, "samples") == [1, 2, 3, 4, 5]
    assert service.runs == {read_run_record(tmp_path / "run")["wandb_id"]}
    said = capfd.readouterr().err
    assert f"http://127.0.0.1:{service.port}/me/megatron_dapo/runs/" in said
    assert "wandb sync" not in said and KEY not in said


@real
def test_a_service_that_falls_silent_in_a_run_gets_the_rest_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_sink, "UPLOAD_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run_dir = tmp_path / "run"
    with running_service("works") as service:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{service.port}")
        sinks = Sinks.open(run_config(run_dir, wandb=True))
        log_steps(sinks, range(1, 4))
        until(lambda: sent_step(run_dir) == 3)
        service.behaviour = "silent"
        log_steps(sinks, range(4, 9))
        sinks.close(complete=True)
        assert not sinks.failures
        assert steps_of(recorded(run_dir), "reward/mean") == [*range(1, 9)]
        (folder,) = run_dir.glob("wandb/run-*")
        said = capfd.readouterr().err
        assert said.count(f"wandb sync --include-online {folder}") == 1
        assert said.count("samples.jsonl only") == 1
        service.behaviour = "works"
        send(f"sync --include-online {folder}", service.port)
    assert steps_of(service.history, "reward/mean")[-8:] == [*range(1, 9)]


@real
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_wandbs_own_process_loses_no_step(
    tmp_path: Path, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    sinks = Sinks.open(run_config(run_dir, wandb=True))
    log_steps(sinks, range(1, 4))
    until(lambda: sent_step(run_dir) == 3)
    (process,) = psutil.Process().children()
    for pid in descendants(process.pid):
        os.kill(pid, number)
    log_steps(sinks, range(4, 5))
    process.wait(PATIENCE)
    log_steps(sinks, range(5, 8))
    assert sinks.failures == {"wandb": 1}
    assert "was started again and sends what is missing" in caplog.text
    sinks.close(complete=True)
    assert steps_of(recorded(run_dir), "reward/mean") == [*range(1, 8)]


@real
def test_signals_to_every_process_of_the_job_end_no_process_of_ours(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    sinks = Sinks.open(run_config(run_dir, wandb=True))
    log_steps(sinks, range(1, 3))
    until(lambda: sent_step(run_dir) == 2)
    (process,) = psutil.Process().children()
    for number in wandb_sink.HELD:
        process.send_signal(number)
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGUSR1)
    log_steps(sinks, range(3, 5))
    sinks.close(complete=True)
    assert not sinks.failures
    assert steps_of(recorded(run_dir), "reward/mean") == [1, 2, 3, 4]


@real
def test_a_process_that_stands_still_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_sink, "FINISH_SECONDS", 1.0)
    run_dir = tmp_path / "run"
    sinks = Sinks.open(run_config(run_dir, wandb=True, samples_per_step=0))
    log_steps(sinks, range(1, 3))
    until(lambda: sent_step(run_dir) == 2)
    (process,) = psutil.Process().children()
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGSTOP)
    for step in range(3, 70_000):  # more than a pipe holds
        sinks._sinks[-1].log(step, {})
    log_steps(sinks, range(3, 5))
    sinks.close(complete=True)
    assert steps_of(recorded(run_dir), "reward/mean") == [1, 2, 3, 4]
    assert "W&B was ended" in caplog.text


@real
def test_what_a_stop_leaves_unsent_the_next_start_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setattr(wandb_sink, "STOP_SECONDS", 0.0)
    sinks = Sinks.open(run_config(run_dir, wandb=True))
    log_steps(sinks, range(1, 4))
    sinks.close()
    assert sent_step(run_dir) == -1
    resumed = Sinks.open(run_config(run_dir, wandb=True))
    log_steps(resumed, range(4, 6))
    resumed.close(complete=True)
    assert steps_of(recorded(run_dir), "reward/mean") == [1, 2, 3, 4, 5]


@real
def test_nothing_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from megatron_dapo.observability.wandb_sink import WandbSink\n"
        "sink = WandbSink(Path(sys.argv[1]), {'project': 'p', 'id': 'abc'})\n"
        "time.sleep(600)\n"
    )
    run_dir = tmp_path / "run"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": tempfile.gettempdir()}
    trainer = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], env=environment)
    until(lambda: (run_dir / "wandb" / "sent.json").exists())
    started = [psutil.Process(pid) for pid in descendants(trainer.pid)]
    assert len(started) >= 2
    trainer.kill()
    trainer.wait()
    gone, alive = psutil.wait_procs(started, PATIENCE)
    assert len(gone) == len(started) and not alive
    (left,) = Path(tempfile.gettempdir()).glob("megatron_dapo*")
    shutil.rmtree(left)  # as a trainer's own end would have


def broken_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WandbSink:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text("raise RuntimeError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    return WandbSink(tmp_path / "run", {"id": "abc"})


def test_a_process_that_ends_while_it_is_told_something_is_missed_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = broken_wandb(tmp_path, monkeypatch)
    sink._process.wait(PATIENCE)
    with monkeypatch.context() as not_yet:
        not_yet.setattr(sink._process, "poll", lambda: None)
        sink.log(1, {})
    with pytest.raises(OSError, match="was started again"):
        sink.log(2, {})
    sink.close(complete=False)


def test_a_process_that_keeps_ending_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = broken_wandb(tmp_path, monkeypatch)
    monkeypatch.setattr(wandb_sink, "MOST_STARTS", 2)
    sink._process.wait(PATIENCE)
    with pytest.raises(
        OSError, match=r"ended with code 1; see .*wandb\.log\. It was started again"
    ):
        sink.log(1, {})
    sink._process.wait(PATIENCE)
    for _ in range(2):
        with pytest.raises(OSError, match="It is not started again"):
            sink.log(2, {})
    sink.close(complete=False)
    assert "RuntimeError: broken" in (tmp_path / "run/logs/wandb.log").read_text()


def test_each_number_of_a_step_is_taken_once_and_steps_rise() -> None:
    sent = Sent()
    assert sent.take({"step": 1, "a": 1.0, "b": None})["a"] == 1.0
    assert sent.take({"step": 1, "a": 2.0, "c": 3.0}) == {"c": 3.0}
    assert sent.take({"step": 2, "a": 4.0}) == {"a": 4.0}
    assert sent.take({"step": 1, "d": 5.0}) == {}
    assert sent.take({"step": 2, "a": 6.0}) == {}


def test_what_was_sent_is_remembered_and_a_damaged_note_is_none(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    sent = Sent(metrics=7, step=3, names=["a"], folder="run-x")
    sent.write(tmp_path)
    assert Sent.read(tmp_path) == sent
    for text in ("", "{", '{"metrik": 1}', "[1]"):
        (tmp_path / "wandb" / "sent.json").write_text(text)
        assert Sent.read(tmp_path) == Sent()


def test_wandb_gets_its_own_key_and_no_other_secret(tmp_path: Path) -> None:
    inherited = {
        **{"WANDB_API_KEY": "key", "HF_TOKEN": "no", "MY_PASSWORD": "no", "PATH": "/bin"},
        **{"HTTPS_PROXY": "http://me:pw@proxy", "WANDB_SERVICE": "another's", "PYTHONPATH": "x"},
    }
    environment = wandb_environment(inherited, tmp_path)
    assert "no" not in environment.values() and "WANDB_SERVICE" not in environment
    assert environment["WANDB_API_KEY"] == "key"
    assert environment["HTTPS_PROXY"] == "http://me:pw@proxy"
    assert environment["PYTHONPATH"] == f"{REPOSITORY}{os.pathsep}x"
    assert Path(environment["WANDB_CACHE_DIR"]).is_relative_to(tmp_path)
    own = wandb_environment({"WANDB_CACHE_DIR": "/mine", "WANDB_ERROR_REPORTING": "true"}, tmp_path)
    assert (own["WANDB_CACHE_DIR"], own["WANDB_ERROR_REPORTING"]) == ("/mine", "true")


def test_metrics_stay_in_their_file_where_wandb_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    sinks = Sinks.open(run_config(tmp_path / "run", wandb=True))
    sinks.log(1, {"loss": 1.0})
    assert sinks.failures == {"wandb": 1}
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == {1: {"loss": 1.0}}


def test_wandb_that_the_user_has_disabled_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sinks = Sinks.open(run_config(tmp_path / "run", wandb=True))
    sinks.log(1, {"loss": 1.0})
    assert wandb_processes() == [] and not sinks.failures
