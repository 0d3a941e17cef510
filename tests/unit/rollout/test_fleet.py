"""Two engines updated as one: halves, failures of either, restarts, and what the trainer sees."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_dapo.config import RunConfig
from megatron_dapo.rollout import engine_watch, replica, restarts, vllm_server
from megatron_dapo.rollout.dispatch import gather_or_cancel
from megatron_dapo.rollout.engine import EngineError, EngineUnavailable, GenerationResult
from megatron_dapo.rollout.event_loop import EventLoopThread
from megatron_dapo.rollout.fleet import EngineFleet
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.vllm_server import session_members
from tests.unit.config.runs import DENSE, make_config, write_model
from tests.unit.rollout.scripted_server import GENERATE, PAYLOAD, REQUEST, ScriptedServer

INFOS = [{"directory": "/dev/shm/w", "replica": index} for index in range(2)]
DIGESTS = [{"w": "0a"}]
PHASES = ["/pause?mode=wait&clear_cache=false", "/start_weight_update", "/update_weights"]
PHASES += ["/finish_weight_update", "/collective_rpc", "/reset_prefix_cache"]
PHASES += ["/update_weight_version", "/weight_info", "/resume"]
PATIENCE_SECONDS = 60.0


@dataclass
class Pair:
    """Two servers in a thread of their own, and the fleet that uses them."""

    servers: list[ScriptedServer]
    fleet: EngineFleet
    loop: EventLoopThread

    def update(self, version: int) -> None:
        self.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, version)
        self.fleet.finish_update(DIGESTS)
        self.fleet.let_requests_in()

    def generate(self, *engines: int) -> list[GenerationResult]:
        async def ask() -> list[GenerationResult]:
            chosen = [self.fleet.engines[index] for index in engines]
            return await gather_or_cancel([engine.generate(REQUEST) for engine in chosen])

        return self.fleet.run(ask())

    def engine(self, index: int) -> VllmEngine:
        """The newest client, which may not serve yet."""
        return self.fleet._replicas[index].engine

    def wait_for_all(self) -> None:
        wait_for(lambda: self.engine(0).usable and self.engine(1).usable)

    def replacements(self) -> dict[int, bool]:
        """Engines that are fresh, once there is one."""
        self.wait_for_all()
        return self.fleet.to_update(all_engines=False)

    def break_and_mend(self, index: int) -> None:
        """The server says that it is broken; once that was noticed, it is not any more."""
        self.servers[index].errors["/health"] = 503
        wait_for(lambda: not self.engine(index).usable)
        del self.servers[index].errors["/health"]

    def drop_until_lost(self, index: int, path: str) -> None:
        """The server breaks every connection with this question, until it is replaced."""
        replica, server = self.fleet._replicas[index], self.servers[index]
        start = replica._start

        async def mended() -> None:
            server.drops.clear()
            await start()

        replica._start = mended  # type: ignore[method-assign]
        server.drops[path] = 500

    def reopen(self, index: int) -> None:
        """The server ends without a word, and a fresh one comes up in its place."""
        self.loop.run(self.servers[index].close())
        self.loop.run(self.servers[index].open())


@pytest.fixture
def longest_silence() -> float:
    """`rollout.heartbeat_timeout_seconds`; a test that waits for it asks for less."""
    return PATIENCE_SECONDS


def pair_config(folder: Path, longest_silence: float = PATIENCE_SECONDS) -> RunConfig:
    endpoints = tuple(f"unix:{folder}/{index}" for index in range(2))
    beats = {"heartbeat_seconds": 0.02, "heartbeat_timeout_seconds": longest_silence}
    model = {"path": str(write_model(folder / "model"))}
    return make_config(model=model, rollout={"engines": 2, "endpoints": endpoints, **beats})


@pytest.fixture
def pair(server: ScriptedServer, longest_silence: float) -> Iterator[Pair]:
    folder = server.socket.parent
    servers = [ScriptedServer(folder / str(index)) for index in range(2)]
    loop = EventLoopThread("scripted servers")
    fleet = EngineFleet(pair_config(folder, longest_silence), "cpu")
    try:
        for each in servers:
            loop.run(each.open())
        fleet.start()
        fleet.wait_ready()
        yield Pair(servers, fleet, loop)
    finally:
        fleet.close()
        for each in servers:
            loop.run(each.close())
        loop.close()
    assert not {"rollout engines", "scripted servers"} & {t.name for t in threading.enumerate()}


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.002)


def test_a_token_that_the_model_does_not_have_is_refused(pair: Pair) -> None:
    pair.update(1)
    pair.servers[0].tokens = [DENSE["vocab_size"] - 1, 2]
    assert len(pair.generate(0)[0].token_ids) == 2
    pair.servers[0].tokens = [DENSE["vocab_size"], 2]
    with pytest.raises(EngineError, match="token 512, which a vocabulary of 512 does not hold"):
        pair.generate(0)


def test_the_first_half_returns_while_the_engines_still_wait_for_weights(pair: Pair) -> None:
    sent = threading.Event()
    answer = ScriptedServer._answer

    async def waits(server: ScriptedServer, path: str, body: object) -> object:
        while path == "/update_weights" and not sent.is_set():
            await asyncio.sleep(0.001)
        return await answer(server, path, body)

    for server in pair.servers:
        server._answer = waits.__get__(server)  # type: ignore[method-assign]
    pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 4)
    wait_for(lambda: all(server.paths[-1:] == ["/update_weights"] for server in pair.servers))
    sent.set()
    assert sorted(pair.fleet.finish_update(DIGESTS)) == [0, 1]
    pair.fleet.let_requests_in()
    assert [result.policy_version for result in pair.generate(0, 1)] == [4, 4]


def test_a_refusal_is_known_while_the_weights_are_still_being_sent(pair: Pair) -> None:
    assert pair.fleet.update_failure() is None
    pair.servers[1].errors["/init_weight_transfer_engine"] = 400
    pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 4)
    wait_for(lambda: pair.fleet.update_failure() is not None)
    said = pair.fleet.update_failure()
    assert isinstance(said, EngineError) and "rollout engine 1" in str(said)
    with pytest.raises(EngineError) as caught:
        pair.fleet.finish_update(DIGESTS)
    assert caught.value is said
    assert pair.fleet.update_failure() is None


def test_every_engine_is_told_its_own_place_and_the_same_update(pair: Pair) -> None:
    pair.update(4)
    for info, server in zip(INFOS, pair.servers, strict=True):
        sent = dict(server.received)
        assert sent["/init_weight_transfer_engine"] == {"init_info": info}
        assert sent["/update_weights"] == {"update_info": PAYLOAD}
    assert pair.fleet.reports == {0: [{"rank": 0}], 1: [{"rank": 0}]}


def test_weights_that_are_described_while_they_are_sent_reach_all_engines(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="start_update comes first"):
        pair.fleet.deliver({"part": 0})
    pair.fleet.start_update(dict(enumerate(INFOS)), {}, 4)
    for part in range(3):
        pair.fleet.deliver({"part": part})
    pair.fleet.finish_update(None)
    pair.fleet.let_requests_in()
    for server in pair.servers:
        parts = [body for path, body in server.received if path == "/update_weights"]
        assert parts == [{"update_info": {"part": part}} for part in range(3)]
        last = len(server.paths) - 1 - server.paths[::-1].index("/update_weights")
        assert server.paths.index("/start_weight_update") < server.paths.index("/update_weights")
        assert last < server.paths.index("/finish_weight_update")
    assert [result.policy_version for result in pair.generate(0, 1)] == [4, 4]


def test_a_part_that_an_engine_refuses_ends_the_update(pair: Pair) -> None:
    pair.fleet.start_update(dict(enumerate(INFOS)), {}, 4)
    pair.servers[1].errors["/update_weights"] = 500
    with pytest.raises(EngineError, match="rollout engine 1 "):
        pair.fleet.deliver({"part": 0})
    with pytest.raises(EngineError, match="failed while loading"):
        pair.fleet.finish_update(None)
    for index in range(2):
        with pytest.raises(EngineError, match="restart the engine"):
            pair.generate(index)


def test_no_engine_goes_on_before_all_are_proven(pair: Pair) -> None:
    pair.servers[1].digests = [{"w": "0b"}]
    with pytest.raises(EngineError, match=r"rollout engine 1 .*w on rank 0 has 0b, expected 0a"):
        pair.update(4)
    for server in pair.servers:
        assert server.paused
        assert "/update_weight_version" not in server.paths


def test_proven_engines_answer_nothing_but_probes_before_requests_are_let_in(pair: Pair) -> None:
    pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 4)
    engines = pair.fleet.finish_update(DIGESTS)
    request = pair.fleet._loop.submit(engines[1].generate(REQUEST))
    assert pair.fleet.run(engines[1].probe(REQUEST)).policy_version == 4
    assert not request.done()
    pair.fleet.let_requests_in()
    assert request.result(PATIENCE_SECONDS).policy_version == 4
    assert [server.paths.count(GENERATE) for server in pair.servers] == [0, 2]


def test_closing_between_proof_and_letting_in_ends_the_requests_that_wait(pair: Pair) -> None:
    pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 4)
    engines = pair.fleet.finish_update(DIGESTS)
    request = pair.fleet._loop.submit(engines[0].generate(REQUEST))
    pair.fleet.run(engines[0].probe(REQUEST))
    pair.fleet.close()
    with pytest.raises((EngineError, CancelledError)):
        request.result(PATIENCE_SECONDS)
    assert pair.servers[0].paths.count(GENERATE) == 1


@pytest.mark.parametrize("phase", PHASES)
def test_a_refusal_of_one_engine_ends_the_use_of_both(pair: Pair, phase: str) -> None:
    pair.update(3)
    pair.servers[1].errors[phase] = 500
    with pytest.raises(EngineError, match="rollout engine 1 "):
        pair.update(4)
    pair.servers[1].errors.clear()
    asked = [server.paths.count(GENERATE) for server in pair.servers]
    for index in range(2):
        with pytest.raises(EngineError, match="restart the engine"):
            pair.generate(index)
    assert [server.paths.count(GENERATE) for server in pair.servers] == asked
    if phase != PHASES[-1]:
        assert pair.servers[1].paused or phase == PHASES[0]


@pytest.mark.parametrize("phase", PHASES)
def test_an_engine_that_dies_inside_an_update_gets_one_of_its_own_and_no_other_does(
    pair: Pair, phase: str
) -> None:
    pair.update(3)
    lost = pair.engine(1)
    pair.drop_until_lost(1, phase)
    pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 4)
    assert list(pair.fleet.finish_update(DIGESTS)) == [0]
    assert list(pair.fleet.reports) == [0]
    pair.fleet.let_requests_in()
    assert pair.generate(0)[0].policy_version == 4
    assert lost.lost and phase in lost.why_unusable
    with pytest.raises(EngineError, match="rollout engine 1"):
        pair.generate(1)
    untouched = len(pair.servers[0].received)
    assert pair.replacements() == {1: True}
    pair.fleet.start_update({1: INFOS[1]}, PAYLOAD, 4)
    assert list(pair.fleet.finish_update(DIGESTS)) == [1]
    pair.fleet.let_requests_in()
    assert pair.generate(1)[0].policy_version == 4
    assert len(pair.servers[0].received) == untouched


@pytest.mark.parametrize("longest_silence", [5.0])
def test_a_restarted_engine_gets_current_weights_before_its_first_request(pair: Pair) -> None:
    pair.update(3)
    before = len(pair.servers[1].received)
    pair.reopen(1)
    with pytest.raises(EngineError, match=r"rollout engine 1 .*version 'default'"):
        pair.generate(1)
    pair.loop.run(pair.servers[1].close())
    wait_for(lambda: not pair.fleet.engines[1].usable)
    pair.loop.run(pair.servers[1].open())
    before = len(pair.servers[1].received)
    assert pair.replacements() == {1: True}
    with pytest.raises(EngineUnavailable, match=r"rollout engine 1 .*is lost"):
        pair.generate(1)
    pair.fleet.start_update({1: INFOS[1]}, PAYLOAD, 3)
    assert list(pair.fleet.finish_update(DIGESTS)) == [1]
    pair.fleet.let_requests_in()
    assert [result.policy_version for result in pair.generate(1, 0)] == [3, 3]
    fresh = pair.servers[1].paths[before:]
    assert fresh[:2] == ["/collective_rpc", "/init_weight_transfer_engine"]
    assert fresh.index("/resume") < fresh.index(GENERATE)


@pytest.mark.parametrize("longest_silence", [5.0])
def test_a_restart_that_brings_wrong_weights_is_not_used(pair: Pair) -> None:
    pair.update(3)
    pair.loop.run(pair.servers[1].close())
    wait_for(lambda: not pair.fleet.engines[1].usable)
    pair.loop.run(pair.servers[1].open())
    assert pair.replacements() == {1: True}
    pair.servers[1].digests = [{"w": "0b"}]
    pair.fleet.start_update({1: INFOS[1]}, PAYLOAD, 3)
    with pytest.raises(EngineError, match="does not hold the weights"):
        pair.fleet.finish_update(DIGESTS)
    with pytest.raises(EngineError, match="rollout engine 1"):
        pair.generate(1)
    assert not pair.engine(1).usable
    assert pair.generate(0)[0].policy_version == 3


def test_an_engine_that_hangs_is_lost_and_what_it_was_asked_ends(pair: Pair) -> None:
    pair.servers[1].seconds_per_token = 30.0
    pair.update(3)
    replica = pair.fleet._replicas[1]
    connect = replica._client
    clients: list[VllmEngine] = []

    async def client() -> VllmEngine:
        """The first one after the loss has a server that hangs, and little patience with it."""
        limit = PATIENCE_SECONDS if clients else 3.0
        object.__setattr__(replica._rollout, "heartbeat_timeout_seconds", limit)
        pair.servers[1].hangs = set() if clients else {"/is_paused"}
        clients.append(await connect())
        return clients[-1]

    replica._client = client  # type: ignore[method-assign]
    request = pair.fleet._loop.submit(pair.fleet.engines[1].generate(REQUEST))
    wait_for(lambda: pair.servers[1].running == 1)
    pair.loop.run(pair.servers[1].close())
    with pytest.raises(EngineUnavailable, match="rollout engine 1"):
        request.result(PATIENCE_SECONDS)
    pair.loop.run(pair.servers[1].open())
    wait_for(lambda: replica.restarts == 2)
    assert "no answer to GET /is_paused" in clients[0].why_unusable
    assert "rollout.heartbeat_timeout_seconds=3)" in clients[0].why_unusable
    assert pair.engine(1) is clients[1] and clients[1].usable
    assert pair.engine(0).usable
    assert pair.fleet.take_counts() == {
        "engine/live": 1.0,
        "engine/restarts": 2.0,
        "engine/lost_requests": 1.0,
    }
    assert pair.fleet.take_counts()["engine/restarts"] == 0.0


def test_an_engine_that_keeps_dying_ends_the_run_with_a_word(pair: Pair) -> None:
    pair.update(3)
    object.__setattr__(pair.fleet._config.rollout, "startup_timeout_seconds", 1)
    pair.servers[1].errors["/health"] = 503
    wait_for(lambda: pair.fleet._replicas[1].failure is not None)
    with pytest.raises(
        EngineError,
        match=r"engine 1 was restarted 3 times .*did not answer again within 1 s .*start it again",
    ):
        pair.fleet.to_update(all_engines=True)


def test_an_error_that_nobody_expects_of_a_replacement_ends_the_run(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreadable(http: object) -> None:
        raise ValueError("not a number")

    monkeypatch.setattr(replica, "end_open_update", unreadable)
    pair.update(1)
    pair.break_and_mend(0)
    wait_for(lambda: pair.fleet._replicas[0].failure is not None)
    with pytest.raises(
        EngineError, match=r"engine 0 is lost and cannot be replaced: .*not a number"
    ):
        pair.fleet.to_update(all_engines=True)


def test_an_engine_that_nothing_watches_any_more_ends_the_run(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(heartbeat: engine_watch.Heartbeat) -> str:
        raise KeyError("status")

    pair.update(1)
    monkeypatch.setattr(engine_watch.Heartbeat, "until_lost", broken)
    pair.break_and_mend(1)  # its next watch is the broken one
    wait_for(lambda: pair.fleet._replicas[1].failure is not None)
    with pytest.raises(EngineUnavailable, match="nothing watches it"):
        pair.fleet.run(pair.engine(1).generate(REQUEST))
    with pytest.raises(EngineError, match="engine 1 is lost and cannot be replaced: KeyError"):
        pair.fleet.to_update(all_engines=False)


def test_an_endpoint_whose_workers_answer_late_is_refused(pair: Pair) -> None:
    pair.servers[0].answers_late = True
    other = EngineFleet(pair_config(pair.servers[0].socket.parent), "cpu")
    try:
        other.start()
        with pytest.raises(EngineError, match=r"rollout engine 0 .*Start the engine again"):
            other.wait_ready()
    finally:
        other.close()


def test_weights_that_could_not_be_sent_leave_engines_to_be_replaced(pair: Pair) -> None:
    pair.update(3)
    pair.servers[1].drops["/update_weights"] = 500
    pair.servers[0].errors["/update_weights"] = 500
    pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 4)
    assert pair.fleet.abandon_update() == [1]
    pair.servers[0].errors.clear()
    pair.servers[1].drops.clear()
    pair.wait_for_all()
    assert pair.fleet.to_update(all_engines=False) == {0: True, 1: True}
    assert [replica._budget.spent for replica in pair.fleet._replicas] == [0, 1]


def test_weights_that_no_engine_was_lost_over_leave_engines_unused(pair: Pair) -> None:
    pair.update(3)
    pair.servers[0].errors["/update_weights"] = 500
    pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 4)
    assert pair.fleet.abandon_update() == []
    for index in range(2):
        with pytest.raises(EngineError, match="restart the engine"):
            pair.generate(index)
    assert [pair.engine(index).usable for index in range(2)] == [False, False]


def test_an_engine_that_is_gone_between_the_halves_is_left_out_of_the_second(pair: Pair) -> None:
    pair.update(3)
    pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 4)
    wait_for(lambda: pair.servers[1].paths.count("/update_weights") == 2)
    pair.loop.run(pair.servers[1].close())
    assert list(pair.fleet.finish_update(DIGESTS)) == [0]
    assert pair.servers[0].paths.count("/resume") == 2
    pair.loop.run(pair.servers[1].open())


def test_halves_come_in_turn(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="start_update comes first"):
        pair.fleet.finish_update(DIGESTS)
    pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 4)
    with pytest.raises(RuntimeError, match="update to version 4 is still open"):
        pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 5)
    pair.fleet.finish_update(DIGESTS)


def test_closing_inside_an_update_ends_it(pair: Pair) -> None:
    pair.servers[0].seconds_per_token = 30.0
    pair.update(3)
    running = pair.fleet._loop.submit(pair.fleet.engines[0].generate(REQUEST))
    wait_for(lambda: pair.servers[0].running == 1)
    pair.fleet.start_update(dict(enumerate(INFOS)), PAYLOAD, 4)
    pair.fleet.close()
    assert running.done()


def gpu_run(*, nodes: int, data: int, **rollout: object) -> RunConfig:
    config = make_config(rollout=rollout, parallel={"data": data, "nodes": nodes})
    return config.model_copy(update={"device": "cuda"})


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        (
            gpu_run(nodes=1, data=4, engines=2, engine_tensor=2, placement="colocated"),
            [(0, 1, 2, 3), (2, 3, 0, 1)],
        ),
        (
            gpu_run(nodes=2, data=8, engines=4, placement="colocated"),
            [(0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)],
        ),
        (
            gpu_run(nodes=1, data=2, engines=2, engine_tensor=2, placement="disaggregated"),
            [(2, 3), (4, 5)],
        ),
    ],
)
def test_engines_on_the_trainers_devices_see_all_of_them_and_their_own_first(
    config: RunConfig, devices: list[tuple[int, ...]]
) -> None:
    fleet = EngineFleet(config, "cuda")
    fleet.close()
    assert [server.options.visible_devices for server in fleet._servers] == devices


STAND_IN = Path(__file__).with_name("stand_in_server.py")


@pytest.fixture
def own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest_silence: float
) -> Iterator[EngineFleet]:
    """Two servers of ours, stand-ins."""

    def command(options: vllm_server.ServerOptions, socket: Path) -> list[str]:
        behaviour = (tmp_path / f"next_{options.index}").read_text()
        (tmp_path / "seeds").open("a").write(f"{options.seed} ")
        return [sys.executable, str(STAND_IN), str(socket), behaviour]

    monkeypatch.setattr(vllm_server, "server_command", command)
    monkeypatch.setattr(vllm_server, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(engine_watch, "LAST_WORDS_SECONDS", 0.2)
    monkeypatch.setattr(restarts, "FIRST_WAIT_SECONDS", 0.001)
    beats = {"heartbeat_seconds": 0.1, "heartbeat_timeout_seconds": longest_silence}
    model = {"path": str(write_model(tmp_path / "model"))}
    config = make_config(model=model, rollout={"engines": 2, **beats})
    config = config.model_copy(update={"run_dir": tmp_path / "run"})
    for index in range(2):
        (tmp_path / f"next_{index}").write_text("serves")
    fleet = EngineFleet(config, "cpu")
    try:
        fleet.start()
        fleet.wait_ready()
        yield fleet
    finally:
        fleet.close()


def wait_for_replacement(fleet: EngineFleet, index: int) -> None:
    before = fleet._replicas[index].restarts
    wait_for(lambda: fleet._replicas[index].restarts == before + 1)
    wait_for(lambda: fleet._replicas[index].engine.usable)


@pytest.mark.parametrize(
    ("number", "longest_silence"), [(signal.SIGKILL, PATIENCE_SECONDS), (signal.SIGSTOP, 5.0)]
)
@pytest.mark.parametrize("whole_session", [True, False])
def test_a_server_that_is_killed_or_stopped_is_replaced(
    own: EngineFleet, tmp_path: Path, number: signal.Signals, whole_session: bool
) -> None:
    published = tmp_path / "weights"
    published.mkdir()
    own.remove_when_orphaned(published)
    first, second = own.engines
    scratch = Path(second.endpoint.removeprefix("unix:")).parent
    shared = Path((scratch / "shared_memory").read_text())
    session = own._servers[1].pid
    assert session is not None
    (server,) = psutil.Process(session).children()
    for pid in session_members(session) if whole_session else [server.pid]:
        os.kill(pid, number)
    wait_for_replacement(own, 1)
    assert own.engines[0] is first
    fresh = own._replicas[1].engine
    assert own.engines[1] is second
    assert fresh.endpoint != second.endpoint
    assert second.lost and not fresh.has_weights
    assert session_members(session) == []
    assert not scratch.exists()
    if number == signal.SIGKILL and not whole_session:
        shared.unlink()  # Python's resource tracker does this for vLLM
    assert not shared.exists()
    listed = Path(fresh.endpoint.removeprefix("unix:")).with_name(vllm_server.ORPHANS_FILE)
    assert listed.read_text() == f"{published}\n"
    seeds = (tmp_path / "seeds").read_text().split()
    assert seeds[0] != seeds[1] and seeds[2:] == [seeds[1]]
    if number == signal.SIGSTOP:
        assert "heartbeat_timeout_seconds=5" in second.why_unusable
    else:
        assert "SIGKILL" in second.why_unusable


def test_a_server_that_ends_whenever_it_starts_is_given_up_with_its_last_words(
    own: EngineFleet, tmp_path: Path
) -> None:
    (tmp_path / "next_1").write_text("dies")
    session = own._servers[1].pid
    assert session is not None
    os.kill(psutil.Process(session).children()[0].pid, signal.SIGKILL)
    wait_for(lambda: own._replicas[1].failure is not None)
    with pytest.raises(EngineError) as caught:
        own.to_update(all_engines=True)
    for words in (
        "rollout engine 1 was restarted 3 times (rollout.max_restarts)",
        "ended before it was ready (ended with exit code 1)",
        "rollout_engine_1.log",
        "out of luck",
    ):
        assert words in str(caught.value)
    assert own.engines[0].usable
    assert len((tmp_path / "seeds").read_text().split()) == 2 + 3
