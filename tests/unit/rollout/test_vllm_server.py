"""Life and death of a server's processes, with a small stand-in for vLLM.

tests/e2e/test_engine_life.py does the same with the real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from megatron_dapo.rollout import vllm_server
from megatron_dapo.rollout.server_options import ServerOptions
from megatron_dapo.rollout.vllm_server import EngineStartError, VllmServer, session_members

STAND_IN = Path(__file__).with_name("stand_in_server.py")
OWNER = Path(__file__).with_name("stand_in_owner.py")
REPOSITORY = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY)}


def options(tmp_path: Path) -> ServerOptions:
    return ServerOptions(
        model=tmp_path,
        index=3,
        seed=0,
        device="cpu",
        tensor=1,
        dtype="float32",
        logprobs="processed",
        max_model_tokens=64,
        max_sequences=4,
        memory_fraction=0.1,
        cpu_kv_cache_gib=1,
        trust_remote_code=False,
        sleep_mode=False,
        startup_timeout_seconds=60,
        log_file=tmp_path / "logs" / "rollout_engine_3.log",
    )


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "GRACE_SECONDS", 1.0)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(behaviour: str) -> None:
        monkeypatch.setattr(
            vllm_server,
            "server_command",
            lambda options, socket: [sys.executable, str(STAND_IN), str(socket), behaviour],
        )

    return use


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)


def shared_memory_of(scratch: Path) -> Path:
    """The stand-in leaves the name of its shared memory behind."""
    return Path((scratch / "shared_memory").read_text())


@dataclass(frozen=True)
class Running:
    """A server that is ready, and what must go with it."""

    server: VllmServer
    session: int
    scratch: Path
    shared: Path

    def check_nothing_is_left(self) -> None:
        assert session_members(self.session) == []
        assert not self.scratch.exists()
        assert not self.shared.exists()


def running(tmp_path: Path) -> Running:
    server = VllmServer(options(tmp_path))
    server.start()
    server.wait_ready()
    assert server.pid is not None
    scratch = Path(server.endpoint.removeprefix("unix:")).parent
    return Running(server, server.pid, scratch, shared_memory_of(scratch))


@pytest.mark.parametrize("behaviour", ["polite", "stubborn"])
def test_stop_leaves_no_process_no_socket_and_no_shared_memory(
    tmp_path: Path, stand_in: Callable[[str], None], behaviour: str
) -> None:
    stand_in(behaviour)
    here = running(tmp_path)
    assert len(session_members(here.session)) == 3  # guardian, server, its child
    assert here.shared.exists()
    here.server.stop()
    here.check_nothing_is_left()
    here.server.stop()  # a second time does nothing


def test_a_server_that_ends_while_starting_is_reported_with_its_last_lines(
    tmp_path: Path, stand_in: Callable[[str], None]
) -> None:
    stand_in("dies")
    server = VllmServer(options(tmp_path))
    server.start()
    with pytest.raises(EngineStartError, match=r"ended before it was ready(.|\n)*out of luck"):
        server.wait_ready()
    assert not server.alive


def test_a_server_that_is_not_ready_in_time_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = ["sh", "-c", "echo not serving; exec sleep 600"]
    monkeypatch.setattr(vllm_server, "server_command", lambda options, socket: silent)
    server = VllmServer(replace(options(tmp_path), startup_timeout_seconds=2))
    server.start()
    session = server.pid
    assert session is not None
    with pytest.raises(EngineStartError, match=r"startup_timeout_seconds=2(.|\n)*not serving"):
        server.wait_ready()
    assert session_members(session) == []


def test_the_log_of_an_earlier_start_is_kept_but_not_quoted(
    tmp_path: Path, stand_in: Callable[[str], None]
) -> None:
    log = tmp_path / "logs" / "rollout_engine_3.log"
    log.parent.mkdir()
    log.write_text("words of yesterday\n")
    stand_in("dies")
    server = VllmServer(options(tmp_path))
    server.start()
    with pytest.raises(EngineStartError) as caught:
        server.wait_ready()
    assert "yesterday" not in str(caught.value)
    assert log.read_text().startswith("words of yesterday\n")


def test_the_server_outlives_the_thread_that_started_it(
    tmp_path: Path, stand_in: Callable[[str], None]
) -> None:
    """The kernel's parent-death signal is about the thread; only the process may count."""
    stand_in("polite")
    server = VllmServer(options(tmp_path))
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        server.wait_ready()
        time.sleep(1.5)
        assert server.alive
    finally:
        server.stop()


def test_a_crashed_server_takes_its_children_along(
    tmp_path: Path, stand_in: Callable[[str], None]
) -> None:
    stand_in("polite")
    here = running(tmp_path)
    (crashed,) = psutil.Process(here.session).children()
    crashed.kill()
    wait_for(lambda: not here.server.alive)
    here.shared.unlink()  # Python's resource tracker does this for vLLM
    here.check_nothing_is_left()
    here.server.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("behaviour", ["polite", "stubborn"])
def test_the_death_of_the_owner_leaves_nothing(
    tmp_path: Path, number: signal.Signals, behaviour: str
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    command = [sys.executable, str(OWNER), str(tmp_path), behaviour, str(STAND_IN), str(weights)]
    owner = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=ENVIRONMENT
    )
    assert owner.stdout is not None
    try:
        session_text, scratch_text = owner.stdout.readline().split()
        session, scratch = int(session_text), Path(scratch_text)
        shared = shared_memory_of(scratch)
        assert len(session_members(session)) == 3
        owner.send_signal(number)
        owner.wait(60)
    finally:
        owner.kill()
        owner.stdout.close()
    wait_for(lambda: not session_members(session))
    wait_for(lambda: not scratch.exists())
    assert not shared.exists()
    if number != signal.SIGINT:  # after SIGINT the owner cleans up itself, and weights are its own
        assert not weights.exists()


def test_a_killed_guardian_takes_the_server_along(
    tmp_path: Path, stand_in: Callable[[str], None]
) -> None:
    stand_in("polite")
    here = running(tmp_path)
    (child,) = psutil.Process(here.session).children()
    os.kill(here.session, signal.SIGKILL)
    wait_for(lambda: not child.is_running())
    here.server.stop()
    here.check_nothing_is_left()


def test_a_second_start_is_refused(tmp_path: Path, stand_in: Callable[[str], None]) -> None:
    stand_in("polite")
    server = VllmServer(options(tmp_path))
    server.start()
    try:
        with pytest.raises(RuntimeError, match="already started"):
            server.start()
    finally:
        server.stop()


def test_the_end_of_a_log_is_told_of_one_that_is_long_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "MOST_LOG_BYTES", 100)
    server = VllmServer(options(tmp_path))
    log_file = server.options.log_file
    assert server.log_tail() == f"({log_file} is not there any more)"
    log_file.parent.mkdir()
    log_file.write_text("first\n" + "x" * 200 + "\nlast\n")
    assert server.log_tail().endswith("x\nlast")
    assert "first" not in server.log_tail()
