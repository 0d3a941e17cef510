"""The notes and buffers of CUDA IPC, with CPU buffers in place of mapped GPU memory."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dapo.resharding import cuda_ipc
from megatron_dapo.resharding.cuda_ipc import CudaIpcReceiver, CudaIpcSender, NoteBoard
from megatron_dapo.resharding.messages import Outbox
from megatron_dapo.resharding.transport import UpdatePayload, new_payload
from tests.plain_engine import PlainWorker
from tests.unit.resharding.transports import (
    BUCKET,
    TRAINERS,
    WORKERS,
    assert_holds,
    expected_digests,
    in_parallel,
    outbox,
    workers,
)


@pytest.fixture
def mapped_by_name(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Buffers are found by a number; everything else is as with GPUs. Of each: who mapped it."""
    buffers: list[Tensor] = []
    mapped: list[list[str]] = []

    def export(buffer: Tensor) -> str:
        buffers.append(buffer)
        mapped.append([])
        return str(len(buffers) - 1)

    def find(note: str, whose: str) -> Tensor:
        mapped[int(note)].append(whose)
        return buffers[int(note)]

    monkeypatch.setattr(cuda_ipc, "require_cuda", lambda: None)
    monkeypatch.setattr(cuda_ipc, "export_buffer", export)
    monkeypatch.setattr(cuda_ipc, "map_buffer", find)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return mapped


def senders(directory: Path, *, timeout: float = 60.0) -> list[CudaIpcSender]:
    limit = timedelta(seconds=timeout)
    board = NoteBoard(directory, 0, 0, TRAINERS, WORKERS, limit)
    cpu = torch.device("cpu")
    return [CudaIpcSender([board], rank, cpu, BUCKET) for rank in range(TRAINERS)]


def exports(box: Outbox) -> int:
    batches = box.batches(BUCKET)
    return len({(n % 2, message.receiver) for n, batch in enumerate(batches) for message in batch})


def payload_of(trainers: list[CudaIpcSender], version: int) -> UpdatePayload:
    payload = new_payload(version, engines=1)
    for rank, trainer in enumerate(trainers):
        trainer.prepare(version, outbox(rank, version))
    trainers[0].describe(payload)
    return payload


def test_workers_read_every_message_before_its_buffer_is_packed_again(
    tmp_path: Path, mapped_by_name: list[list[str]]
) -> None:
    trainers, engine = senders(tmp_path), workers("cuda_ipc", tmp_path, timeout=60)
    for version, generation in ((1, 0), (2, 0), (2, 1)):  # the last one once more
        payload = payload_of(trainers, version)
        assert payload["generations"] == [generation]
        boxes = [outbox(rank, version) for rank in range(TRAINERS)]
        errors = in_parallel(
            *(partial(trainers[r].send, version, boxes[r], (0,)) for r in range(TRAINERS)),
            *(partial(worker.weights.receive, payload) for worker in engine),
        )
        assert errors == [None] * 4
        for rank, worker in enumerate(engine):
            assert_holds(worker, rank, version)
            assert worker.weights.digests() == expected_digests(boxes, rank)
        # Each of two buffers was exported to each worker that reads it, once for each board.
        assert len(mapped_by_name) == (generation + 1) * sum(map(exports, boxes))
        assert all(len(users) == 1 for users in mapped_by_name)
    assert all(0 < trainer.staging_bytes <= 2 * BUCKET + 64 for trainer in trainers)


@pytest.mark.usefixtures("mapped_by_name")
def test_notes_of_updates_do_not_pile_up(tmp_path: Path) -> None:
    trainers, engine = senders(tmp_path), workers("cuda_ipc", tmp_path, timeout=60)
    sizes = []
    for version in range(1, 5):
        payload = payload_of(trainers, version)
        errors = in_parallel(
            *(
                partial(trainers[r].send, version, outbox(r, version), (0,))
                for r in range(TRAINERS)
            ),
            *(partial(worker.weights.receive, payload) for worker in engine),
        )
        assert errors == [None] * 4
        for trainer in trainers:
            trainer.acknowledged(version)
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"notes_0_0_handles", f"notes_0_0_{version}"}
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert sizes[-1] < 1.2 * sizes[0]


@pytest.mark.usefixtures("mapped_by_name")
def test_what_ended_one_update_does_not_end_the_next(tmp_path: Path) -> None:
    trainers, engine = senders(tmp_path), workers("cuda_ipc", tmp_path, timeout=60)
    payload_of(trainers, 1)
    trainers[0].call_off((0,), "rollout engine 1 answered 400")
    payload = payload_of(trainers, 2)
    errors = in_parallel(
        *(partial(trainers[r].send, 2, outbox(r, 2), (0,)) for r in range(TRAINERS)),
        *(partial(worker.weights.receive, payload) for worker in engine),
    )
    assert errors == [None] * 4


@pytest.mark.usefixtures("mapped_by_name")
def test_ranks_meet_again_after_one_of_them_failed_before_it_sent_anything(tmp_path: Path) -> None:
    trainers, engine = senders(tmp_path), workers("cuda_ipc", tmp_path, timeout=60)
    payload_of(trainers, 1)
    boxes = [outbox(rank, 1) for rank in range(TRAINERS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainers[1], "_share", lambda *batches: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainers[1].send(1, boxes[1], (0,))
    trainers[0]._sent.add(1)  # the other rank got further
    payload = payload_of(trainers, 1)
    assert len({trainer._boards[0].generation for trainer in trainers}) == 1
    errors = in_parallel(
        *(partial(trainers[r].send, 1, boxes[r], (0,)) for r in range(TRAINERS)),
        *(partial(worker.weights.receive, payload) for worker in engine),
    )
    assert errors == [None] * 4


@pytest.mark.usefixtures("mapped_by_name")
def test_a_worker_that_does_not_read_is_named(tmp_path: Path) -> None:
    trainers = senders(tmp_path, timeout=5)
    engine: list[PlainWorker] = workers("cuda_ipc", tmp_path, timeout=5)
    payload = payload_of(trainers, 1)
    errors = in_parallel(
        *(partial(trainers[rank].send, 1, outbox(rank, 1), (0,)) for rank in range(TRAINERS)),
        partial(engine[0].weights.receive, payload),
    )
    assert any("rank 1 of engine 0 did not read bucket" in str(error) for error in errors[:2])


@pytest.mark.usefixtures("mapped_by_name")
def test_a_trainer_that_does_not_offer_is_named(tmp_path: Path) -> None:
    trainers, engine = senders(tmp_path), workers("cuda_ipc", tmp_path, timeout=3)
    payload = payload_of(trainers, 1)
    errors = in_parallel(*(partial(worker.weights.receive, payload) for worker in engine))
    wanted = [f"trainer rank {rank} did not offer bucket" for rank in range(TRAINERS)]
    assert all(str(e).startswith(w) for e, w in zip(errors, wanted, strict=True)), errors


@pytest.mark.usefixtures("mapped_by_name")
def test_an_update_that_is_called_off_ends_every_wait_at_once(tmp_path: Path) -> None:
    trainers, engine = senders(tmp_path, timeout=300), workers("cuda_ipc", tmp_path, timeout=300)
    payload = payload_of(trainers, 1)
    trainers[0].call_off((0,), "rollout engine 0 answered 400")
    started = time.monotonic()
    errors = in_parallel(
        *(partial(trainers[rank].send, 1, outbox(rank, 1), (0,)) for rank in range(TRAINERS)),
        partial(engine[0].weights.receive, payload),
    )
    assert time.monotonic() - started < 100
    assert all("called off: rollout engine 0 answered 400" in str(error) for error in errors)


@pytest.mark.usefixtures("mapped_by_name")
def test_a_worker_finds_its_messages_where_the_sender_lays_them(tmp_path: Path) -> None:
    receiver = workers("cuda_ipc", tmp_path)[1].weights.receiver
    assert isinstance(receiver, CudaIpcReceiver)
    for sender in range(TRAINERS):
        for number, batch in enumerate(outbox(sender).batches(BUCKET)):
            for message, start in zip(batch, cuda_ipc.place(batch)[:-1], strict=True):
                if message.receiver == 1:
                    wanted = (number, start, message.num_bytes)
                    assert receiver._place(message.bucket, sender) == wanted
    with pytest.raises(RuntimeError, match="no message of bucket 99999 of rank 0"):
        receiver._place(99999, 0)


def test_without_a_gpu_both_sides_refuse(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    for build in (partial(senders, tmp_path), partial(workers, "cuda_ipc", tmp_path)):
        with pytest.raises(RuntimeError, match="transport=cuda_ipc: this process sees no CUDA"):
            build()
