"""Messages over gloo: what arrives, what is held meanwhile, and who is named when it does not."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dapo.resharding.meeting import Meeting
from megatron_dapo.resharding.messages import Message, Outbox
from megatron_dapo.resharding.point_to_point import HEADER_BYTES, PointToPointSender
from megatron_dapo.resharding.transport import Receiver, new_payload
from tests.plain_engine import PlainWorker
from tests.unit.resharding.transports import (
    BUCKET,
    TRAINERS,
    WORKERS,
    assert_holds,
    expected_digests,
    in_parallel,
    outbox,
    small_plan,
    workers,
)

SHORT = 5.0
"""Seconds until somebody is given up."""
FOREVER = 300.0
"""Seconds after which nobody is to be given up any more."""
HANG = 100.0
"""Between what a test takes, and `FOREVER` or no end at all."""


def sender(directory: Path, rank: int, *, timeout: float = 60.0) -> PointToPointSender:
    meeting = Meeting(
        directory, 0, 0, TRAINERS, WORKERS, backend="gloo", timeout=timedelta(seconds=timeout)
    )
    return PointToPointSender([meeting], rank, torch.device("cpu"), BUCKET)


def update(
    trainers: list[PointToPointSender], engine: list[PlainWorker], boxes: list[Outbox], version: int
) -> list[BaseException | None]:
    """One update of all; what each trainer, then each worker raised."""
    payload = new_payload(version, engines=1)
    trainers[0].describe(payload)
    sends: list[Callable[[], object]] = [
        partial(trainer.send, version, box, (0,))
        for trainer, box in zip(trainers, boxes, strict=True)
    ]
    return in_parallel(*sends, *(lambda w=worker: w.weights.receive(payload) for worker in engine))


def test_workers_hold_what_was_sent_and_nobody_holds_more_than_two_buckets(
    tmp_path: Path,
) -> None:
    trainers = [sender(tmp_path, rank) for rank in range(TRAINERS)]
    engine = workers("gloo", tmp_path)
    plan = small_plan()
    assert plan.num_buckets > 4
    for version in (1, 2):
        boxes = [outbox(rank, version) for rank in range(TRAINERS)]
        assert update(trainers, engine, boxes, version) == [None] * 4
        for rank, worker in enumerate(engine):
            assert_holds(worker, rank, version)
            assert worker.weights.digests() == expected_digests(boxes, rank)
    headers = 2 * TRAINERS * WORKERS * (HEADER_BYTES + 8)
    held = [trainer.staging_bytes for trainer in trainers]
    held += [worker.weights.receiver.staging_bytes for worker in engine]
    assert all(0 < most <= 2 * BUCKET + headers for most in held)
    assert [path.name for path in tmp_path.iterdir()] == ["group_0_0"]
    for trainer in trainers:
        trainer.close()


class Faulty(Outbox):
    """Rank 1's outbox with one fault in the message of one bucket to worker 0."""

    def __init__(self, fault: str) -> None:
        good = outbox(1, 1)
        super().__init__(good.plan, 1, good.sources)
        self.fault = fault
        buckets = [message.bucket for message in self if message.receiver == 0]
        self.bucket = buckets[len(buckets) // 2]

    def batches(self, limit: int) -> list[list[Message]]:
        found = super().batches(limit)
        if self.fault == "dropped":
            kept = [[m for m in batch if not self.is_meant(m)] for batch in found]
            return [batch for batch in kept if batch]
        return found[::-1] if self.fault == "wrong order" else found

    def is_meant(self, message: Message) -> bool:
        return (message.bucket, message.receiver) == (self.bucket, 0)

    def pack(self, message: Message, out: Tensor) -> None:
        super().pack(message, out)
        if self.fault == "corrupted" and self.is_meant(message):
            out[-1] ^= 1


def faulty_update(
    tmp_path: Path, fault: str, timeout: float = SHORT
) -> tuple[list[PlainWorker], Faulty, list]:
    bad = Faulty(fault)
    trainers = [sender(tmp_path, rank, timeout=timeout) for rank in range(TRAINERS)]
    engine = workers("gloo", tmp_path, timeout=timeout)
    boxes = [outbox(0, 1), bad]
    return engine, bad, [update(trainers, engine, boxes, 1), boxes]


def test_a_flipped_bit_is_found_by_the_digest_of_its_parameter(tmp_path: Path) -> None:
    engine, bad, (errors, boxes) = faulty_update(tmp_path, "corrupted", FOREVER)
    assert errors == [None] * 4
    wanted, found = expected_digests(boxes, 0), engine[0].weights.digests()
    damaged = next(message for message in bad if bad.is_meant(message)).transfers[-1].target
    assert [name for name in wanted if wanted[name] != found[name]] == [damaged]
    assert engine[1].weights.digests() == expected_digests(boxes, 1)


def test_a_dropped_bucket_ends_the_update_and_names_bucket_and_sender(tmp_path: Path) -> None:
    started = time.monotonic()
    _, bad, (errors, _) = faulty_update(tmp_path, "dropped")
    assert time.monotonic() - started < HANG
    lost = f"bucket {bad.bucket} of the new weights did not come from trainer rank 1"
    assert str(errors[2]).startswith(lost)


def test_buckets_in_another_order_end_the_update(tmp_path: Path) -> None:
    _, _, (errors, _) = faulty_update(tmp_path, "wrong order")
    assert "did not come from trainer rank 1" in str(errors[2])
    assert "did not take bucket" in str(errors[1])


def test_messages_of_another_version_are_refused(tmp_path: Path) -> None:
    trainers = [sender(tmp_path, rank, timeout=SHORT) for rank in range(TRAINERS)]
    engine = workers("gloo", tmp_path, timeout=SHORT)
    payload = new_payload(8, engines=1)
    errors = in_parallel(
        *(lambda r=rank: trainers[r].send(7, outbox(r, 7), (0,)) for rank in range(TRAINERS)),
        *(lambda w=worker: w.weights.receive(payload) for worker in engine),
    )
    assert "says version 7" in str(errors[2]) and "expected are version 8" in str(errors[2])


def test_messages_are_taken_in_plan_order(tmp_path: Path) -> None:
    trainers = [sender(tmp_path, rank, timeout=SHORT) for rank in range(TRAINERS)]
    engine = workers("gloo", tmp_path, timeout=SHORT)

    def wrong_order() -> None:
        engine[0].weights.receiver.begin(new_payload(1, engines=1))
        engine[0].weights.receiver.receive(1, 0)

    errors = in_parallel(
        *(lambda r=rank: trainers[r].send(1, outbox(r, 1), (0,)) for rank in range(TRAINERS)),
        wrong_order,
        lambda: engine[1].weights.receive(new_payload(1, engines=1)),
    )
    assert "plan order" in str(errors[2])


@pytest.mark.parametrize("missing", ["trainer rank 1", "rank 1 of engine 0"])
def test_who_does_not_come_is_named_by_all_who_wait(tmp_path: Path, missing: str) -> None:
    trainers = [sender(tmp_path, rank, timeout=SHORT) for rank in range(TRAINERS)]
    engine = workers("gloo", tmp_path, timeout=SHORT)
    payload = new_payload(1, engines=1)
    there: dict[str, Callable[[], object]] = {}
    for rank in range(TRAINERS):
        there[f"trainer rank {rank}"] = partial(trainers[rank].send, 1, outbox(rank, 1), (0,))
    for rank, worker in enumerate(engine):
        there[f"rank {rank} of engine 0"] = partial(worker.weights.receive, payload)
    del there[missing]
    started = time.monotonic()
    errors = in_parallel(*there.values())
    assert time.monotonic() - started < HANG
    assert all(str(error).startswith(f"{missing} did not join") for error in errors), errors


def test_a_transfer_that_is_called_off_ends_every_wait_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    trainers = [sender(tmp_path, rank, timeout=FOREVER) for rank in range(TRAINERS)]
    engine = workers("gloo", tmp_path, timeout=FOREVER)

    def refuse() -> None:
        time.sleep(1)  # the others are waiting by now
        trainers[0].call_off((0,), "rollout engine 0 answered 400")

    started = time.monotonic()
    payload = new_payload(1, engines=1)
    errors = in_parallel(
        *(partial(trainers[rank].send, 1, outbox(rank, 1), (0,)) for rank in range(TRAINERS)),
        partial(engine[0].weights.receive, payload),  # worker 1 does not come
        refuse,
    )
    assert time.monotonic() - started < HANG
    reason = "called off: rollout engine 0 answered 400"
    assert all(reason in str(error) for error in errors[:-1]), errors
    for trainer in trainers:
        trainer.rejoin((0,))
    boxes = [outbox(rank, 2) for rank in range(TRAINERS)]
    assert update(trainers, engine, boxes, 2) == [None] * 4
    assert_holds(engine[0], 0, 2)


class FakeNccl:
    """Takes what a member posts; nothing ever arrives."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> FakeNccl:
        self.calls.append("end")
        return self

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        self.calls.append(f"recv from {rank}")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError("NCCL timed out")


def nccl_receiver(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, timeout: float
) -> tuple[Receiver, FakeNccl, Meeting]:
    group = FakeNccl()
    monkeypatch.setattr(Meeting, "join", lambda self, rank, device: group)
    receiver = workers("nccl", directory, timeout=timeout)[0].weights.receiver
    meeting = Meeting(
        directory, 0, 0, TRAINERS, WORKERS, backend="nccl", timeout=timedelta(seconds=timeout)
    )
    return receiver, group, meeting


def test_over_nccl_a_bucket_is_asked_for_as_one_and_aborted_when_it_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, group, _ = nccl_receiver(tmp_path, monkeypatch, timeout=0.5)
    receiver.begin(new_payload(1, engines=1))
    plan = small_plan()
    asked: list[str] = []
    for bucket in range(2):
        asked += ["start", *(f"recv from {s}" for s in plan.senders_of(bucket, 0)), "end"]
    assert group.calls == asked
    with pytest.raises(RuntimeError, match=r"did not come from trainer rank .*NCCL timed out"):
        receiver.receive(0, plan.senders_of(0, 0)[0])
    receiver.end()
    assert [call for call in group.calls[len(asked) :] if "recv" not in call][-1] == "abort"
    assert group.calls.count("abort") == 1


def test_over_nccl_a_transfer_that_is_called_off_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, group, meeting = nccl_receiver(tmp_path, monkeypatch, timeout=FOREVER)
    receiver.begin(new_payload(1, engines=1))
    meeting.call_off("rollout engine 0 answered 400")
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="called off: rollout engine 0 answered 400"):
        receiver.receive(0, small_plan().senders_of(0, 0)[0])
    assert time.monotonic() - started < HANG
    assert group.calls[-1] == "abort"


def _worker_that_dies(rank: int, directory: Path) -> None:
    """Gone after the first bucket."""
    receiver = workers("gloo", directory)[rank].weights.receiver
    receiver.begin(new_payload(1, engines=1))
    for sender_rank in small_plan().senders_of(0, rank):
        receiver.receive(0, sender_rank)
    os._exit(9)


class Dying(Outbox):
    """Gone in the middle."""

    def pack(self, message: Message, out: Tensor) -> None:
        if message.bucket > small_plan().num_buckets // 2:
            os._exit(9)
        super().pack(message, out)


def _trainer_that_dies(rank: int, directory: Path) -> None:
    good = outbox(rank, 1)
    sender(directory, rank).send(1, Dying(good.plan, rank, good.sources), (0,))


@contextmanager
def process_that_dies(
    role: Callable[[int, Path], None], rank: int, directory: Path
) -> Iterator[None]:
    """A process of its own, forked before any thread starts."""
    process = multiprocessing.get_context("fork").Process(target=role, args=(rank, directory))
    process.start()
    try:
        yield
        process.join(60)
        assert process.exitcode == 9
    finally:
        process.kill()
        process.join()


def test_a_worker_that_dies_is_named_and_its_successor_gets_everything(tmp_path: Path) -> None:
    with process_that_dies(_worker_that_dies, 0, tmp_path):
        trainers = [sender(tmp_path, rank, timeout=SHORT) for rank in range(TRAINERS)]
        engine = workers("gloo", tmp_path, timeout=SHORT)
        payload = new_payload(1, engines=1)
        errors = in_parallel(
            *(lambda r=rank: trainers[r].send(1, outbox(r, 1), (0,)) for rank in range(TRAINERS)),
            lambda: engine[1].weights.receive(payload),
        )
    named = [
        error
        for error in errors[:TRAINERS]
        if str(error).startswith(("rank 0 of engine 0 did not take", "rank 0 of engine 0 cannot"))
    ]
    assert named, errors
    for trainer in trainers:
        trainer.rejoin((0,))
    engine = workers("gloo", tmp_path)
    boxes = [outbox(rank, 2) for rank in range(TRAINERS)]
    assert update(trainers, engine, boxes, 2) == [None] * 4
    assert_holds(engine[0], 0, 2)


def test_a_trainer_that_dies_is_named_by_the_workers_at_once(tmp_path: Path) -> None:
    with process_that_dies(_trainer_that_dies, 1, tmp_path):
        trainer = sender(tmp_path, 0, timeout=FOREVER)
        engine = workers("gloo", tmp_path, timeout=FOREVER)
        payload = new_payload(1, engines=1)
        started = time.monotonic()
        errors = in_parallel(
            lambda: trainer.send(1, outbox(0, 1), (0,)),
            *(lambda w=worker: w.weights.receive(payload) for worker in engine),
        )
    assert any("did not come from trainer rank 1" in str(error) for error in errors[1:]), errors
    assert time.monotonic() - started < HANG
