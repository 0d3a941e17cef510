"""Responses that are complete before a kill are never sampled again, and nothing else is reused."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_dapo.rollout import response_store
from megatron_dapo.rollout.engine import GenerationRequest, GenerationResult
from megatron_dapo.rollout.response_store import ResponseStore
from tests.conftest import REPOSITORY
from tests.unit.rollout.fake_engine import FakeEngine

VERSION = 3
WEIGHTS = [{"embedding": "0a", "head": "0b"}, {"embedding": "0c", "head": "0d"}]
REQUESTS = [
    GenerationRequest(
        prompt_token_ids=(50, seed),
        seed=seed,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=16,
        stop_token_ids=(2,),
        request_id=f"train-4-{seed}-0",
    )
    for seed in range(20)
]
KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from megatron_dapo.rollout.response_store import ResponseStore
from tests.unit.rollout.fake_engine import FakeEngine
from tests.unit.rollout.test_response_store import REQUESTS, VERSION, WEIGHTS

async def main():
    store = ResponseStore(Path(sys.argv[1]), "processed")
    await store.serve(VERSION, WEIGHTS)
    engine = FakeEngine(VERSION)
    for request in REQUESTS[:7]:
        await store.sampled(request, engine.generate)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def sample(
    folder: Path,
    requests: Sequence[GenerationRequest] = REQUESTS,
    *,
    engine: FakeEngine | None = None,
    weights: list[dict[str, str]] | None = WEIGHTS,
    logprobs: str = "processed",
) -> tuple[list[GenerationResult], FakeEngine]:
    """What a process gets that begins now, and the engine that it asked."""
    engine = engine or FakeEngine(VERSION)

    async def run() -> list[GenerationResult]:
        store = ResponseStore(folder, logprobs)
        await store.serve(VERSION, weights)
        work = (store.sampled(request, engine.generate) for request in requests)
        try:
            return await asyncio.gather(*work)
        finally:
            store.close()

    return asyncio.run(run()), engine


def file_of(folder: Path, version: int = VERSION) -> Path:
    return folder / f"version_{version:08d}.jsonl"


def test_what_was_complete_before_a_kill_is_not_sampled_again(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert killed.returncode == -9
    results, engine = sample(tmp_path)
    assert engine.requests == REQUESTS[7:]
    direct = FakeEngine(VERSION)
    assert results == [asyncio.run(direct.generate(request)) for request in REQUESTS]
    _, engine = sample(tmp_path)
    assert engine.requests == []


def test_log_probs_come_back_to_the_bit(tmp_path: Path) -> None:
    numbers = (-0.1, -1.5, float("-inf"), -3.14159265358979)
    result = GenerationResult((5, 6, 7, 2), numbers, "stop", ((0, VERSION),), VERSION)

    async def generate(request: GenerationRequest) -> GenerationResult:
        return result

    async def run() -> list[GenerationResult]:
        found = []
        for _ in range(2):
            store = ResponseStore(tmp_path, "raw")
            await store.serve(VERSION, WEIGHTS)
            found.append(await store.sampled(REQUESTS[0], generate))
            store.close()
        return found

    assert asyncio.run(run()) == [result, result]


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": [{"embedding": "0a", "head": "0b"}, {"embedding": "0c", "head": "ff"}]},
        {"logprobs": "raw"},
        {"requests": [dataclasses.replace(request, temperature=0.9) for request in REQUESTS]},
        {"requests": [dataclasses.replace(request, max_tokens=8) for request in REQUESTS]},
        {
            "requests": [
                dataclasses.replace(request, seed=request.seed + 99) for request in REQUESTS
            ]
        },
    ],
    ids=["weights", "log-probs", "temperature", "length", "seed"],
)
def test_anything_else_is_sampled_anew(tmp_path: Path, changed: dict) -> None:
    sample(tmp_path)
    _, engine = sample(tmp_path, **changed)
    assert len(engine.requests) == len(REQUESTS)


def test_without_digests_nothing_is_stored(tmp_path: Path) -> None:
    _, engine = sample(tmp_path, weights=None)
    assert len(engine.requests) == len(REQUESTS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "engine",
    [
        FakeEngine(VERSION, finish=lambda request: "abort"),
        FakeEngine(VERSION - 1),
        FakeEngine(VERSION, updated_after=0),
    ],
    ids=["interrupted", "older weights", "two versions"],
)
def test_what_is_no_whole_response_of_these_weights_is_not_stored(
    tmp_path: Path, engine: FakeEngine
) -> None:
    sample(tmp_path, engine=engine)
    _, engine = sample(tmp_path)
    assert len(engine.requests) == len(REQUESTS)


def test_a_torn_end_and_a_flipped_bit_cost_those_responses_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for request in REQUESTS:
        sample(tmp_path, [request])
    path = file_of(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(REQUESTS)
    middle = bytearray(lines[5])
    middle[len(middle) // 2] ^= 1
    path.write_bytes(b"".join([*lines[:5], bytes(middle), *lines[6:-1], lines[-1][:-20]]))
    with caplog.at_level(logging.WARNING):
        _, engine = sample(tmp_path)
    assert engine.requests == [REQUESTS[4], REQUESTS[-1]]
    assert "2 damaged responses" in caplog.text
    _, engine = sample(tmp_path)
    assert engine.requests == []


def test_every_cut_of_the_file_leaves_the_lines_before_it(tmp_path: Path) -> None:
    few = REQUESTS[:3]
    for request in few:
        sample(tmp_path, [request])
    whole = file_of(tmp_path).read_bytes()
    ends = [end + 1 for end, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(0, len(whole), 7):
        file_of(tmp_path).write_bytes(whole[:size])
        _, engine = sample(tmp_path, few)
        kept = sum(end <= size for end in ends[1:])
        assert engine.requests == few[kept:], size
        assert sample(tmp_path, few)[1].requests == [], size


@pytest.mark.parametrize("fault", ["write", "flush", "folder"])
def test_a_full_disk_costs_the_store_and_not_the_run(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "rollouts"
    if fault == "folder":
        folder.write_text("in the way")
    else:
        name = {"write": "pwrite", "flush": "fsync"}[fault]
        sample(folder, REQUESTS[:1])
        monkeypatch.setattr(response_store.os, name, full)
    with caplog.at_level(logging.WARNING):
        results, engine = sample(folder)
    assert len(results) == len(REQUESTS)
    assert caplog.text.count("responses are not stored") == 1
    if fault != "folder":
        monkeypatch.undo()
        _, engine = sample(folder)
        assert set(engine.requests) <= set(REQUESTS[1:])
        assert engine.requests == REQUESTS[1:] or fault == "flush"
        assert sample(folder)[1].requests == []


def test_many_responses_at_once_share_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = []
    flush = os.fsync

    def counted(descriptor: int) -> None:
        flushes.append(descriptor)
        flush(descriptor)

    monkeypatch.setattr(response_store.os, "fsync", counted)
    sample(tmp_path)
    assert 1 <= len(flushes) < len(REQUESTS)
    assert sample(tmp_path)[1].requests == []


def test_a_new_version_goes_into_a_file_of_its_own_and_old_ones_go(tmp_path: Path) -> None:
    async def run() -> None:
        store = ResponseStore(tmp_path, "processed")
        for version in (3, 4, 5):
            await store.serve(version, WEIGHTS)
            await store.sampled(REQUESTS[0], FakeEngine(version).generate)
        store.forget_before(4)
        store.close()

    (tmp_path / "notes.txt").write_text("mine")
    asyncio.run(run())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "version_00000004.jsonl",
        "version_00000005.jsonl",
    ]


def test_a_run_without_checkpoints_does_not_fill_the_disk(tmp_path: Path) -> None:
    async def run() -> None:
        store = ResponseStore(tmp_path, "processed")
        for version in range(response_store.MOST_VERSIONS + 3):
            await store.serve(version, WEIGHTS)
        store.close()

    asyncio.run(run())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == response_store.MOST_VERSIONS
    assert names[0] == "version_00000003.jsonl"


def test_the_same_weights_again_keep_the_file(tmp_path: Path) -> None:
    async def run() -> FakeEngine:
        store, engine = ResponseStore(tmp_path, "processed"), FakeEngine(VERSION)
        for _ in range(2):  # an engine came back and got the version once more
            await store.serve(VERSION, WEIGHTS)
            await store.sampled(REQUESTS[0], engine.generate)
        store.close()
        return engine

    assert len(asyncio.run(run()).requests) == 1


def test_what_is_changed_under_a_run_is_sampled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> tuple[list[GenerationResult], FakeEngine]:
        store, engine = ResponseStore(tmp_path, "processed"), FakeEngine(VERSION)
        await store.serve(VERSION, WEIGHTS)
        for request in REQUESTS[:3]:
            await store.sampled(request, engine.generate)
        header, first, second, third = file_of(tmp_path).read_bytes().splitlines(keepends=True)
        broken = bytearray(second)
        broken[-9] ^= 1
        file_of(tmp_path).write_bytes(header + first + broken + third[:-30])
        engine.requests.clear()
        found = [await store.sampled(request, engine.generate) for request in REQUESTS[:3]]
        store.close()
        return found, engine

    with caplog.at_level(logging.WARNING):
        found, engine = asyncio.run(run())
    assert engine.requests == REQUESTS[1:3]
    direct = FakeEngine(VERSION)
    assert found == [asyncio.run(direct.generate(request)) for request in REQUESTS[:3]]
    assert caplog.text.count("sampled again") == 2


def test_a_disk_that_stays_full_uses_up_no_file_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        store = ResponseStore(tmp_path, "processed")
        for version in range(30):
            await store.serve(version, WEIGHTS)
        store.close()

    monkeypatch.setattr(response_store.os, "pwrite", full)
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(run())
    assert len(os.listdir("/proc/self/fd")) < before + 10


def test_a_link_in_the_place_of_a_file_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("of somebody else")
    folder = tmp_path / "rollouts"
    folder.mkdir()
    file_of(folder).symlink_to(precious)
    with caplog.at_level(logging.WARNING):
        results, _ = sample(folder)
    assert len(results) == len(REQUESTS)
    assert precious.read_text() == "of somebody else"
    assert "responses are not stored" in caplog.text


def test_an_update_that_closes_the_file_under_a_response_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = response_store.ResponseFile(file_of(tmp_path), b"header\n", VERSION)
    file.close()
    file.append([("key", b"line\n")])
    assert file_of(tmp_path).read_bytes() == b"header\n"
    assert file.find("key") is None


def test_what_cannot_be_deleted_keeps_nothing_else(tmp_path: Path) -> None:
    for version in range(5):
        file_of(tmp_path, version).write_text("old")
    for version in (1, 3):
        file_of(tmp_path, version).unlink()
        file_of(tmp_path, version).mkdir()
    ResponseStore(tmp_path, "processed").forget_before(5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "version_00000001.jsonl",
        "version_00000003.jsonl",
    ]


def test_stored_responses_are_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample(tmp_path)
    readers = []
    read = response_store.read_result

    def noted(line: bytes) -> GenerationResult:
        readers.append(threading.current_thread())
        return read(line)

    monkeypatch.setattr(response_store, "read_result", noted)
    _, engine = sample(tmp_path)
    assert engine.requests == []
    assert len(readers) == len(REQUESTS)
    assert threading.current_thread() not in readers
