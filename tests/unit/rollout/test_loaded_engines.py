"""How engines are started that serve a folder without trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.config import RunConfig, load_config
from megatron_dapo.rollout.loaded_engines import LoadedEngines, loading_options
from megatron_dapo.rollout.vllm_server import EngineStartError, VllmServer
from tests.unit.config.runs import write_run


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
