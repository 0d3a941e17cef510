"""A server with two tensor-parallel workers, owned by a process that is killed.

tests/unit/rollout/test_vllm_server.py goes through more ways to die with a stand-in for vLLM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.rollout.vllm_server import session_members
from tests.e2e.conftest import (
    PARITY,
    generate,
    largest_gap,
    mapped_shared_memory,
    prompts,
    publish,
    request,
    run_with_engine,
    tiny_plan,
)
from tests.tiny_models import save_tiny_model, tiny_model

REPOSITORY = Path(__file__).parents[2]


@dataclass
class OwnedServer:
    owner: subprocess.Popen[str]
    session: int
    endpoint: str
    weights_directory: Path
    plan: ReshardPlan


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnedServer]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("owned")
    save_tiny_model(folder / "model", "qwen3_moe")
    weights = Path(tempfile.mkdtemp(prefix="megatron_dapo_test_", dir="/dev/shm"))
    script = Path(__file__).with_name("owner.py")
    owner = subprocess.Popen(
        [sys.executable, str(script), str(folder), str(weights)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert owner.stdout is not None
    try:
        session, endpoint = owner.stdout.readline().split()
        plan = tiny_plan(folder / "model", "qwen3_moe", tensor=2)
        yield OwnedServer(owner, int(session), endpoint, weights, plan)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_two_workers_give_the_same_logprobs_before_and_after_updates(owned: OwnedServer) -> None:
    asked = [request(prompt, row) for row, prompt in enumerate(prompts())]
    model = tiny_model("qwen3_moe")
    for version, seed in enumerate((0, 51, 52)):
        if version:
            model = tiny_model("qwen3_moe", seed=seed)
            published = publish(model, owned.plan, owned.weights_directory, version)
            run_with_engine(owned.endpoint, published.install)
        results = run_with_engine(owned.endpoint, lambda engine: generate(engine, asked))
        assert largest_gap(model, asked, results) <= PARITY
        assert {result.policy_version for result in results} == {version}


def test_two_workers_talk_over_loopback_and_unix_sockets_only(owned: OwnedServer) -> None:
    addresses = [
        connection.laddr.ip
        for pid in session_members(owned.session)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    ]
    assert addresses
    assert set(addresses) == {"127.0.0.1"}


def test_killing_the_owner_leaves_no_process_socket_or_shared_memory(owned: OwnedServer) -> None:
    before = session_members(owned.session)
    assert len(before) >= 5  # guardian, API server, engine core, two workers
    socket = Path(owned.endpoint.removeprefix("unix:"))
    shared = mapped_shared_memory(owned.session)
    assert shared
    owned.owner.send_signal(signal.SIGKILL)
    owned.owner.wait()
    deadline = time.monotonic() + 240
    while (session_members(owned.session) or socket.parent.exists()) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert session_members(owned.session) == []
    assert not socket.parent.exists()
    assert not owned.weights_directory.exists()
    assert [path for path in shared if path.exists()] == []
