"""How engines are started that serve a folder without trainers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.config import RunConfig, load_config
from megatron_dapo.rollout import engine_watch, vllm_engine, vllm_server
from megatron_dapo.rollout.engine import EngineUnavailable
from megatron_dapo.rollout.loaded_engines import LoadedEngines, loading_options
from megatron_dapo.rollout.vllm_server import EngineStartError, VllmServer, session_members
from tests.unit.config.runs import write_model, write_run
from tests.unit.rollout.scripted_server import REQUEST


def run(folder: Path, *overrides: str) -> RunConfig:
    return load_config(write_run(folder), overrides)


def test_every_engine_loads_the_folder_on_devices_of_its_own(tmp_path: Path) -> None:
    config = run(
        tmp_path,
        *("rollout.engines=2", "rollout.engine_tensor=2", "parallel.data=8"),
        "rollout.placement=colocated",
        "resharding.transport=vllm_nccl",
    )
    first, second = loading_options(config, tmp_path / "hf", "cuda")
    assert (first.visible_devices, second.visible_devices) == ((0, 1), (2, 3))
    assert first.seed != second.seed
    for options in (first, second):
        assert options.model == tmp_path / "hf"
        assert not options.sleep_mode
        assert options.backend == "megatron_dapo"
        assert options.tensor == 2
        assert options.log_file.parent == config.run_dir / "logs"
    assert first.log_file != second.log_file


def test_on_cpu_no_device_is_named(tmp_path: Path) -> None:
    (options,) = loading_options(run(tmp_path), tmp_path / "hf", "cpu")
    assert options.visible_devices == ()


def test_running_servers_are_not_touched(tmp_path: Path) -> None:
    config = run(tmp_path, "rollout.endpoints=[unix:/tmp/a, unix:/tmp/b]", "rollout.engines=2")
    assert len(loading_options(config, tmp_path / "hf", "cpu")) == 2


def test_when_one_does_not_start_the_others_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def wait_ready(server: VllmServer) -> None:
        if server.options.index == 1:
            raise EngineStartError("ended")

    monkeypatch.setattr(VllmServer, "start", lambda server: calls.append("start"))
    monkeypatch.setattr(VllmServer, "wait_ready", wait_ready)
    monkeypatch.setattr(VllmServer, "stop", lambda server: calls.append("stop"))
    engines = LoadedEngines(run(tmp_path, "rollout.engines=2"), tmp_path / "hf", "cpu")
    with pytest.raises(EngineStartError, match="ended"), engines:
        pytest.fail("entered")
    assert calls == ["start", "start", "stop", "stop"]


STAND_IN = Path(__file__).with_name("stand_in_server.py")


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadedEngines]:
    """Two servers without a model, which answer whether they live."""

    def command(options: vllm_server.ServerOptions, socket: Path) -> list[str]:
        return [sys.executable, str(STAND_IN), str(socket), "serves"]

    async def stamp(http: object) -> str:
        return "default"

    monkeypatch.setattr(vllm_server, "server_command", command)
    monkeypatch.setattr(vllm_server, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(vllm_engine, "served_stamp", stamp)
    monkeypatch.setattr(engine_watch, "LAST_WORDS_SECONDS", 0.2)
    beats = ("rollout.heartbeat_seconds=0.1", "rollout.heartbeat_timeout_seconds=2")
    config = run(tmp_path, "rollout.engines=2", *beats)
    assert config.rollout.request_timeout_seconds >= 600
    with LoadedEngines(config, write_model(tmp_path / "hf"), "cpu") as engines:
        yield engines


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_request_does_not_wait_for_an_engine_that_hangs_or_is_gone(
    serving: LoadedEngines, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    session = serving._servers[1].pid
    assert session is not None
    for pid in session_members(session):
        os.kill(pid, number)
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"rollout engine 1 \(log in .* is lost: "):
        serving.run(serving.engines[1].generate(REQUEST))
    assert time.monotonic() - started < 60
    assert serving.engines[0].usable
    while session_members(session):
        assert time.monotonic() - started < 60
        time.sleep(0.01)
    if number == signal.SIGSTOP:
        assert "heartbeat_timeout_seconds=2" in serving.engines[1].why_unusable


def test_an_engine_that_nothing_watches_any_more_is_not_waited_for(
    serving: LoadedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(watch: engine_watch.EngineWatch) -> None:
        raise KeyError("status")

    monkeypatch.setattr(engine_watch.EngineWatch, "until_gone", broken)
    engine = serving.run(serving._connect(serving._servers[0]))
    with pytest.raises(EngineUnavailable, match="nothing watches it any more: KeyError"):
        serving.run(engine.generate(REQUEST))
    serving.run(engine.close())
