"""Messages through files: published as a whole, read only from their directory, damage found."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import safetensors

from megatron_dapo.resharding import files
from megatron_dapo.resharding.files import FileSender, file_name, version_folder
from megatron_dapo.resharding.messages import Outbox
from megatron_dapo.resharding.transport import UpdatePayload, new_payload
from tests.unit.resharding.transports import (
    TRAINERS,
    WORKERS,
    assert_holds,
    expected_digests,
    in_parallel,
    outbox,
    small_plan,
    workers,
)


class Agreement:
    """Stands in for the control group."""

    def __init__(self, ranks: int) -> None:
        self._barrier = Barrier(ranks)
        self._failures: list[Exception] = []

    def __call__(self, failure: Exception | None) -> None:
        if failure is not None:
            self._failures.append(failure)
        self._barrier.wait(60)
        failures = list(self._failures)
        self._barrier.wait(60)  # all have looked before anybody goes on
        if failures:
            raise RuntimeError(str(failures[0]))


def senders(directory: Path) -> list[FileSender]:
    agree = Agreement(TRAINERS)
    return [FileSender(directory, agree, leads=rank == 0) for rank in range(TRAINERS)]


def publish(all_senders: list[FileSender], version: int) -> list[Outbox]:
    boxes = [outbox(rank, version) for rank in range(TRAINERS)]
    errors = in_parallel(
        *(
            lambda s=sender, b=box: s.prepare(version, b)
            for sender, box in zip(all_senders, boxes, strict=True)
        )
    )
    for error in errors:
        if error is not None:
            raise error
    return boxes


def payload_of(sender: FileSender, version: int) -> UpdatePayload:
    payload = new_payload(version, engines=1)
    sender.describe(payload)
    return payload


def test_workers_hold_what_all_ranks_published(tmp_path: Path) -> None:
    trainers, engine = senders(tmp_path), workers("files", tmp_path)
    for version in (1, 2):
        boxes = publish(trainers, version)
        for rank, worker in enumerate(engine):
            worker.weights.receive(payload_of(trainers[0], version))
            assert_holds(worker, rank, version)
            assert worker.weights.digests() == expected_digests(boxes, rank)
    found = {path.name for path in version_folder(tmp_path, 2).iterdir()}
    assert found == {file_name(s, r) for s in range(TRAINERS) for r in range(WORKERS)}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.glob("policy_2/*"))


def test_a_version_stays_until_the_next_one_is_acknowledged(tmp_path: Path) -> None:
    trainers = senders(tmp_path)
    publish(trainers, 1)
    publish(trainers, 2)
    late = workers("files", tmp_path)[0]
    late.weights.receive(payload_of(trainers[0], 1))
    assert_holds(late, 0, 1)
    for sender in trainers:
        sender.acknowledged(2)
    assert [path.name for path in tmp_path.iterdir()] == ["policy_2"]
    publish(trainers, 2)  # once more, after a failure further on
    late.weights.receive(payload_of(trainers[0], 2))
    assert_holds(late, 0, 2)


def test_what_one_rank_cannot_write_fails_on_all_and_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = os.posix_fallocate

    def full_for_rank_1(descriptor: int, offset: int, size: int) -> None:
        if "from_1_" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, size)

    trainers = senders(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full_for_rank_1)
    errors = in_parallel(
        *(
            lambda s=sender, r=rank: s.prepare(1, outbox(r, 1))
            for rank, sender in enumerate(trainers)
        )
    )
    assert all("No space left" in str(error) for error in errors), errors
    assert not version_folder(tmp_path, 1).exists()


def test_a_parameter_that_one_rank_lacks_fails_on_all_at_once(tmp_path: Path) -> None:
    trainers, boxes = senders(tmp_path), [outbox(rank, 1) for rank in range(TRAINERS)]
    boxes[1].sources = {}
    errors = in_parallel(
        *(partial(sender.prepare, 1, box) for sender, box in zip(trainers, boxes, strict=True))
    )
    assert all("which it does not hold" in str(error) for error in errors), errors


def test_a_worker_opens_the_file_of_a_sender_once_for_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def counting(path: Path, **options: str) -> object:
        opened.append(path.name)
        return safetensors.safe_open(path, **options)

    trainers, engine = senders(tmp_path), workers("files", tmp_path)
    monkeypatch.setattr(files, "safe_open", counting)
    for version in (1, 2):
        publish(trainers, version)
        engine[0].weights.receive(payload_of(trainers[0], version))
        assert_holds(engine[0], 0, version)
    assert small_plan().num_buckets > 4
    assert sorted(opened) == sorted(file_name(sender, 0) for sender in (0, 0, 1, 1))
    here = str(tmp_path)
    held = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in held if path.startswith(here)]


def damage(folder: Path, position: int) -> None:
    path = folder / file_name(1, 0)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_one_flipped_bit_changes_the_digest_of_its_parameter_alone(tmp_path: Path) -> None:
    trainers, engine = senders(tmp_path), workers("files", tmp_path)
    boxes = publish(trainers, 1)
    damage(version_folder(tmp_path, 1), -1)
    engine[0].weights.receive(payload_of(trainers[0], 1))
    found, wanted = engine[0].weights.digests(), expected_digests(boxes, 0)
    last = [message for message in boxes[1] if message.receiver == 0][-1].transfers[-1]
    assert [name for name in wanted if found[name] != wanted[name]] == [last.target]


def test_incomplete_foreign_and_outdated_files_are_refused(tmp_path: Path) -> None:
    trainers, engine = senders(tmp_path), workers("files", tmp_path)
    publish(trainers, 1)
    publish(trainers, 2)
    folder = version_folder(tmp_path, 2)
    whole = (folder / file_name(1, 0)).read_bytes()
    later = payload_of(trainers[0], 2)

    (folder / file_name(1, 0)).write_bytes(whole[:-8])
    with pytest.raises(RuntimeError, match="of trainer rank 1 cannot be read"):
        engine[0].weights.receive(later)
    (folder / file_name(1, 0)).unlink()
    with pytest.raises(RuntimeError, match=r"bucket \d+ of trainer rank 1 is missing"):
        engine[0].weights.receive(later)
    (folder / file_name(1, 0)).write_bytes(
        (version_folder(tmp_path, 1) / file_name(1, 0)).read_bytes()
    )
    with pytest.raises(RuntimeError, match="policy_version '1', expected is '2'"):
        engine[0].weights.receive(later)
    (folder / file_name(1, 0)).write_bytes((folder / file_name(0, 0)).read_bytes())
    with pytest.raises(RuntimeError, match="planned are"):
        engine[0].weights.receive(later)


def test_only_the_private_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    engine = workers("files", tmp_path / "here")
    for folder in (tmp_path / "policy_1", tmp_path / "here" / ".." / "policy_1"):
        payload = new_payload(1, engines=1)
        payload["folder"] = str(folder)
        with pytest.raises(ValueError, match="not in"):
            engine[0].weights.receive(payload)
