"""Workers that hang, fork, allocate, die or lie cost one sample each, never the run."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_dapo.config.schema import RewardConfig
from megatron_dapo.reward.grade import grade_response
from megatron_dapo.reward.grader_pool import SPARE, GraderPool, check_graders
from megatron_dapo.reward.grader_process import GraderReply, GraderStartError
from megatron_dapo.reward.plugin import RewardMeta
from megatron_dapo.types import Prompt, Response
from tests.conftest import REPOSITORY

PLUGIN = "tests.unit.reward.hostile_plugins:act"
PATIENCE_SECONDS = 60.0
"""No answer takes that long, however busy the machine is."""
LIMIT_SECONDS = 0.5
"""What a call gets that never ends by itself."""
LONGEST_SECONDS = 20.0
"""Of our own check on any text: it takes a hundredth of a second, and would take hours where its
time grew with the square of the length."""
META = asdict(RewardMeta("p1", "unit", 0, 2, 10, "stop"))
CANARY = "canary-4711"
CONFIG = RewardConfig(
    plugin=PLUGIN,
    workers=2,
    time_limit_seconds=PATIENCE_SECONDS,
    cpu_limit_seconds=5,
    memory_limit_mib=128,
)


def job(text: str) -> dict[str, object]:
    return {"prompt": "p", "response": text, "answer": "7", "meta": META}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[GraderPool]:
    pool = GraderPool(CONFIG, tmp_path / "graders", tmp_path / "graders.log")
    pool.start()
    yield pool
    pids = pool.worker_pids()
    pool.close()
    assert not any(is_running(pid) for pid in pids)


@contextmanager
def impatient(pool: GraderPool) -> Iterator[None]:
    """Calls that begin meanwhile get `LIMIT_SECONDS`."""
    object.__setattr__(pool._config, "time_limit_seconds", LIMIT_SECONDS)
    try:
        yield
    finally:
        object.__setattr__(pool._config, "time_limit_seconds", PATIENCE_SECONDS)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until(done: object, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.01)


def wait_until_all_are_ready(pool: GraderPool) -> None:
    wait_until(lambda: pool._free.qsize() == CONFIG.workers + SPARE)


FAILURES = {
    "hang": "time_limit",
    "hang_in_c": "time_limit",
    "ignore_signals": "time_limit",
    "fork_for_ever": "time_limit",
    "sleep 60": "time_limit",
    "allocate": "memory_limit",
    "allocate_slowly": "memory_limit",
    "kill_itself": "died",
    "crash": "died",
    "exit_hard": "died",
    "forge": "died",
    "forge_depth": "died",
    "forge_size": "died",
    "leave": "raised",
    "fail x": "raised",
    "fail unprintable": "raised",
    "fail interrupt": "raised",
    "fail deep": "raised",
}


@pytest.mark.parametrize("deed", FAILURES)
def test_a_bad_call_is_one_failure_and_the_next_call_works(deed: str, pool: GraderPool) -> None:
    if FAILURES[deed] == "time_limit":
        with impatient(pool):
            reply = pool.call(job(deed))
        assert reply.error == f"took longer than {LIMIT_SECONDS:g} s"
    else:
        reply = pool.call(job(deed))
    assert (reply.value, reply.failure) == (None, FAILURES[deed]), reply
    assert [pool.call(job("x")).value for _ in range(4)] == [{"": 1.0}] * 4
    overruns = float(FAILURES[deed] in ("time_limit", "memory_limit"))
    restarts = float(FAILURES[deed] != "raised")
    assert pool.take_counts() == {
        "reward/limit_overruns": overruns,
        "reward/worker_restarts": restarts,
    }
    assert set(pool.take_counts().values()) == {0.0}


def test_cpu_time_has_a_limit_of_its_own(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"cpu_limit_seconds": 1, "time_limit_seconds": 300.0})
    pool = GraderPool(config, tmp_path)
    pool.start()
    try:
        reply = pool.call(job("hang"))
        assert (reply.failure, reply.error) == ("time_limit", "ended by SIGXCPU")
        assert pool.call(job("sleep 1.5")).value == {"": 1.0}, "sleeping is no CPU time"
    finally:
        pool.close()


def test_the_end_of_a_worker_is_told_also_where_it_takes_long(pool: GraderPool) -> None:
    reply = pool.call(job("end_slowly"))
    assert (reply.failure, reply.error) == ("time_limit", "ended by SIGXCPU")


def test_what_a_call_leaves_running_is_ended_with_its_worker(
    pool: GraderPool, tmp_path: Path
) -> None:
    file = tmp_path / "grandchild"
    with impatient(pool):
        while not file.exists():  # a slow machine may not come so far within the limit
            assert pool.call(job(f"leave_a_child {file}")).failure == "time_limit"
    pid = int(file.read_text())
    wait_until(lambda: not is_running(pid))


def test_a_fork_that_comes_back_answers_nothing(pool: GraderPool) -> None:
    for _ in range(10):
        assert pool.call(job("fork_and_return")).value == {"": 1.0}
        assert pool.call(job("x")).value == {"": 1.0}


def test_what_a_call_prints_goes_to_the_log_and_is_no_reply(
    pool: GraderPool, tmp_path: Path
) -> None:
    assert pool.call(job("say hello")).value == {"": 1.0}
    assert pool.call(job("read_input")).value == {"": 0.0}
    text = (tmp_path / "graders.log").read_text()
    assert "hello" in text and "from a child" in text


def test_the_first_failure_is_told_with_its_traceback_and_later_ones_are_not(
    pool: GraderPool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for kind in ("one", "two", "three"):
            pool.call(job(f"fail {kind}"))
    assert len(caplog.records) == 1
    assert "cannot grade one" in caplog.text and "hostile_plugins.py" in caplog.text


def test_workers_see_no_secret_and_load_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "SOMETHING", "WANTED"):
        monkeypatch.setenv(name, CANARY)
    config = CONFIG.model_copy(update={"workers": 1})
    pool = GraderPool(config, tmp_path)
    pool.start()
    try:
        assert pool.call(job(f"look_for {CANARY}")).value == {"accuracy": 1.0, "found": 0.0}
        for name in ("torch", "transformers", "vllm", "numpy"):
            value = pool.call(job(f"imported {name}")).value
            assert value == {"accuracy": 1.0, "imported": 0.0}, name
    finally:
        pool.close()
    wanting = GraderPool(config.model_copy(update={"plugin_environment": ("WANTED",)}), tmp_path)
    wanting.start()
    try:
        for name, seen in (("WANTED", 1.0), ("SOMETHING", 0.0)):
            assert wanting.call(job(f"see {name}")).value == {"accuracy": 1.0, "seen": seen}
    finally:
        wanting.close()


@pytest.mark.parametrize("network", [False, True])
def test_a_worker_reaches_the_network_only_where_it_may(network: bool, tmp_path: Path) -> None:
    may_isolate = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
    if not network and may_isolate.returncode:
        pytest.skip("the kernel lets this user have no network namespace")
    pool = GraderPool(CONFIG.model_copy(update={"plugin_network": network}), tmp_path)
    pool.start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            reply = pool.call(job(f"connect 127.0.0.1:{server.getsockname()[1]}"))
        finally:
            pool.close()
    assert reply.value == {"accuracy": 1.0, "connected": float(network)}


def test_a_worker_killed_from_outside_loses_one_sample_and_none_is_answered_twice(
    pool: GraderPool,
) -> None:
    stop = threading.Event()
    ready: set[int] = set()

    def kill() -> None:
        while not stop.wait(0.2):
            for pid in ready.intersection(pool.worker_pids()):
                os.kill(pid, signal.SIGKILL)
                break

    def call(_: int) -> GraderReply:
        reply = pool.call(job("tell_pid 0.1"))
        if isinstance(reply.value, dict):
            ready.add(int(reply.value["pid"]))
        return reply

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    ends = Counter[str | None]()
    with ThreadPoolExecutor(4) as threads:
        while len(ends) < 2:  # until a worker was killed inside a call
            ends.update(reply.failure for reply in threads.map(call, range(40)))
    stop.set()
    killer.join()
    assert set(ends) == {None, "died"}
    assert pool.take_counts()["reward/worker_restarts"] >= ends["died"]


def test_signals_to_every_process_of_a_job_step_cost_no_sample(
    pool: GraderPool, tmp_path: Path
) -> None:
    wait_until_all_are_ready(pool)
    workers = pool.worker_pids()
    busy = tmp_path / "busy"
    busy.mkdir()
    with ThreadPoolExecutor(2) as threads:
        replies = [threads.submit(pool.call, job(f"meet {busy} 3")) for _ in range(2)]
        wait_until(lambda: len(list(busy.iterdir())) == 2)
        for pid in workers:
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGTERM)
        (busy / "go").touch()
        assert [reply.result().value for reply in replies] == [{"": 1.0}] * 2
    assert pool.worker_pids() == workers
    stopped = {"forked": float(signal.SIGTERM), "started": -float(signal.SIGTERM)}
    assert pool.call(job("stop_children")).value == stopped


def test_an_idle_worker_that_died_costs_no_sample(pool: GraderPool) -> None:
    wait_until_all_are_ready(pool)
    for pid in pool.worker_pids():
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not is_running(pid))
    assert [pool.call(job("x")).value for _ in range(4)] == [{"": 1.0}] * 4


def test_calls_run_side_by_side(pool: GraderPool, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    with ThreadPoolExecutor(2) as threads:
        replies = list(threads.map(lambda _: pool.call(job(f"meet {here} 2")), range(2)))
    assert [reply.value for reply in replies] == [{"": 1.0}] * 2


def test_closing_ends_busy_workers_and_waiting_callers(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"time_limit_seconds": 600.0})
    pool = GraderPool(config, tmp_path / "graders")
    pool.start()
    busy = tmp_path / "busy"
    busy.mkdir()
    ended: list[GraderReply | GraderStartError] = []

    def call() -> None:
        try:
            ended.append(pool.call(job(f"meet {busy} 99")))
        except GraderStartError as error:
            ended.append(error)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    wait_until(lambda: len(list(busy.iterdir())) == 3)
    pids = pool.worker_pids()
    pool.close()
    pool.close()
    for caller in callers:
        caller.join(PATIENCE_SECONDS)
    assert len(ended) == 4 and not any(is_running(pid) for pid in pids)
    with pytest.raises(GraderStartError, match="closed"):
        pool.call(job("x"))


def test_workers_that_can_no_longer_start_end_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_dapo.reward.grader_pool.RETRY_SECONDS", 0.01)
    config = CONFIG.model_copy(update={"plugin": "tests.unit.reward.fatal_import:grade"})
    pool = GraderPool(config, tmp_path)
    pool.start()
    try:
        with pytest.raises(GraderStartError, match=r"3 times.*ended with code 3"):
            pool.call(job("x"))
    finally:
        pool.close()


def test_workers_start_again_after_their_folders_were_cleared_away(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    pool = GraderPool(CONFIG, logs / "graders", logs / "graders.log")
    pool.start()
    with ThreadPoolExecutor(1) as threads:
        try:
            for _ in range(2 * (CONFIG.workers + 1)):
                shutil.rmtree(logs, ignore_errors=True)
                reply = threads.submit(pool.call, job("exit_hard")).result(PATIENCE_SECONDS)
                assert reply.failure == "died"
        finally:
            pool.close()


def test_workers_that_have_no_place_to_start_end_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_dapo.reward.grader_pool.RETRY_SECONDS", 0.01)
    (tmp_path / "logs").write_text("a file where a folder belongs")
    pool = GraderPool(CONFIG, tmp_path / "logs" / "graders")
    pool.start()
    with ThreadPoolExecutor(1) as threads:
        try:
            with pytest.raises(GraderStartError, match=r"3 times.*Not a directory"):
                threads.submit(pool.call, job("x")).result(PATIENCE_SECONDS)
        finally:
            pool.close()


PARENT = """
import sys, time
from pathlib import Path
from megatron_dapo.config.schema import RewardConfig
from megatron_dapo.reward.grader_pool import GraderPool
pool = GraderPool(RewardConfig(plugin=sys.argv[1], time_limit_seconds=600.0), Path(sys.argv[2]))
pool.start()
meta = dict(prompt_id="p", source="", sample_index=0, response_tokens=1, max_response_tokens=1,
            finish_reason="stop")
pool.call({"prompt": "p", "response": "x", "answer": "7", "meta": meta})
print(*pool.worker_pids(), flush=True)
pool.call({"prompt": "p", "response": f"meet {sys.argv[3]} 99", "answer": "7", "meta": meta})
"""


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, PLUGIN, str(tmp_path), str(busy)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids and all(map(is_running, pids))
        wait_until(lambda: list(busy.iterdir()))
        parent.kill()
    wait_until(lambda: not any(map(is_running, pids)))


def test_math_verify_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"not here.*megatron_dapo\[math\]"):
        check_graders(RewardConfig(math_verify=True))


def test_nothing_is_started_where_nothing_runs_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatron_dapo.reward.grader_pool.GraderProcess", lambda *_: pytest.fail("started")
    )
    check_graders(RewardConfig())


# --- 10,000 hostile answers ---------------------------------------------------------------------

CHEAP = [
    lambda r: "Answer: " + r.choice("{}[]()\\$^_9x") * r.choice([10, 1000, 1_000_000]),
    lambda r: "Answer: $\\frac{" * r.randint(1, 200) + "1",
    lambda r: "\\boxed{" * r.randint(1, 500) + "7" + "}" * r.randint(0, 500),
    lambda r: "Answer: " + "".join(r.choices("\u0664\u0966\uff17\u2160\u00b2\u2077\u5341", k=9)),
    lambda r: "Answer: __import__('os').system('kill -9 $PPID')",
    lambda r: "Answer: $(lambda: exec('while 1: pass'))()$",
    lambda r: "Answer: ${{7*7}}$ `id`; DROP TABLE rewards;-- \0 \x1b[2J",
    lambda r: "Answer: " + "".join(chr(r.randint(0, 0xFFFF)) for _ in range(40)),
    lambda r: "Answer: 1/0 \\infty \\int_0^1 x dx",
    lambda r: "Answer: \ud800\udfff7",
]
COSTLY = [
    lambda r: "Answer: $" + "^".join(["9"] * r.randint(2, 9)) + "$",
    lambda r: "Answer: $" + "9^{" * (n := r.randint(2, 60)) + "9" + "}" * n + "$",
    lambda r: "Answer: $\\sum_{i=1}^{10^{" + str(r.randint(1, 99)) + "}} i$",
    lambda r: "Answer: $" + "+".join(f"x_{{{i}}}^{{{i}}}" for i in range(r.randint(1, 60))) + "$",
    lambda r: "Answer: $" + str(r.randint(10, 10**6)) + "!" * r.randint(1, 5) + "$",
    lambda r: "Answer: $(x+y+z)^{" + str(r.randint(2, 10**6)) + "}$",
]
"""Small texts that take a computer algebra system for ever."""


def hostile_answers(count: int) -> Iterator[tuple[str, bool]]:
    """Texts, and whether it is one of the costly ones."""
    chance = random.Random(5)
    for _ in range(count):
        costly = chance.random() < 0.05
        text = chance.choice(COSTLY if costly else CHEAP)(chance)
        yield text if chance.random() < 0.98 else "x" * 1_000_000 + text, costly


def grade_text(text: str, config: RewardConfig, pool: GraderPool | None) -> float | None:
    """Accuracy of a response; the truth is 13."""
    prompt = Prompt("p1", "p", (1,), "13")
    response = Response("p1", 0, (5,), (0.0,), "stop", 0, 0, text)
    return grade_response(prompt, response, config, max_response_tokens=10, pool=pool).accuracy


@pytest.mark.parametrize("style", ["answer_line", "boxed", "either", "dapo_reference"])
def test_our_own_check_hangs_on_none_of_ten_thousand_hostile_answers(style: str) -> None:
    config = RewardConfig(style=style, overlong_buffer_tokens=0)  # type: ignore[arg-type]
    for text, _ in hostile_answers(10_000):
        started = time.monotonic()
        assert grade_text(text, config, None) == 0.0
        assert time.monotonic() - started < LONGEST_SECONDS, text[-200:]


@pytest.mark.parametrize("answers", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_answers_neither_hang_nor_break_math_verify(answers: int, tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="the extra megatron_dapo[math] is not installed")
    config = RewardConfig(
        style="either",
        math_verify=True,
        time_limit_seconds=PATIENCE_SECONDS,
        overlong_buffer_tokens=0,
    )
    pool = GraderPool(config, tmp_path)
    pool.start()
    try:
        for text, costly in hostile_answers(answers):
            if costly:
                with impatient(pool):
                    assert grade_text(text, config, pool) in (0.0, None), text
            else:
                assert grade_text(text, config, pool) == 0.0, text[-200:]
    finally:
        pool.close()
