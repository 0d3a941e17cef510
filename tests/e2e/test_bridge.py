"""Real trainer ranks into real engines: every byte arrives, every damage is found, none is served.

The engines are the test's own, so that many layouts and many faults share one start of vLLM.
tests/e2e/test_bridge_deaths.py kills engines and corrupts whole runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_dapo.resharding.messages import Message, Outbox
from megatron_dapo.rollout.engine import EngineError, GenerationRequest, GenerationResult
from megatron_dapo.trainer import Trainer
from tests.e2e.conftest import request
from tests.e2e.runs import make_start
from tests.e2e.trainers import (
    Scene,
    answers,
    ask_engine,
    change_weights,
    check_engine,
    connect_again,
    export,
    opened_trainer,
    record_expected,
    run_trainers,
    running_engines,
    stamp,
)

pytestmark = pytest.mark.timeout(1800)
GLOO = ("resharding.transport=gloo", "resharding.timeout_seconds=120")
FLIPS = 8
Payload = MutableMapping[str, object]
Damage = Callable[[Payload], None]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One engine, tied embeddings and biases."""
    pytest.importorskip("vllm")
    start = make_start(tmp_path_factory.mktemp("bridge"), "qwen2_tied")
    with running_engines(start, tensor=1) as running:
        yield running


def prove(rank: int, world: int, scene: Scene, runs: list[tuple[str, ...]]) -> None:
    """For each layout and transport: the start's weights, then those after an optimizer step."""
    for overrides in runs:
        with opened_trainer(rank, world, scene, *overrides) as trainer:
            expected = record_expected(trainer)
            trainer.sync_weights()
            if rank == 0:
                for endpoint in scene.endpoints:
                    check_engine(trainer, endpoint, expected[-1], scene.start.model, 0)
            trainer.step(1)
            trained = trainer.config.run_dir / "trained"
            export(trainer, trained)
            if rank == 0:
                before = load_file(scene.start.model / "model.safetensors")
                after = load_file(trained / "model.safetensors")
                assert [n for n in before if torch.equal(before[n], after[n])] == []
                for endpoint in scene.endpoints:
                    check_engine(trainer, endpoint, expected[-1], trained, 1)


def test_two_ranks_bring_every_byte_to_an_engine(scene: Scene) -> None:
    run_trainers(2, prove, scene, [("parallel.tensor=2",), ("parallel.pipeline=2", *GLOO)])


TENSOR, STAGES, COPIES = ("parallel.tensor=2",), ("parallel.pipeline=2",), ("parallel.data=2",)
EXPERTS = ("parallel.data=2", "parallel.expert=2")
SPLIT_EXPERTS = ("parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=1")
FOUR = ("parallel.tensor=2", "parallel.pipeline=2")
FOUR_EXPERTS = (*TENSOR, "parallel.data=2", "parallel.expert=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tensor", "count", "two", "four"),
    [
        ("qwen2_tied", 2, 1, [TENSOR, (*STAGES, *GLOO)], [FOUR]),
        ("qwen2", 1, 2, [TENSOR, (*TENSOR, *GLOO), STAGES, COPIES], [(*FOUR, *GLOO)]),
        ("qwen3_moe", 2, 1, [EXPERTS, (*EXPERTS, *GLOO), SPLIT_EXPERTS, STAGES], [FOUR_EXPERTS]),
        ("qwen3_moe", 1, 2, [EXPERTS, (*TENSOR, *GLOO)], [(*FOUR_EXPERTS, *GLOO)]),
        ("qwen2_tied", 2, 2, [TENSOR, (*STAGES, *GLOO)], []),
    ],
)
def test_every_layout_brings_every_byte_to_every_engine(
    family: str,
    tensor: int,
    count: int,
    two: list[tuple[str, ...]],
    four: list[tuple[str, ...]],
    tmp_path: Path,
) -> None:
    pytest.importorskip("vllm")
    start = make_start(tmp_path, family)
    with running_engines(start, tensor=tensor, count=count) as running:
        run_trainers(2, prove, running, two)
        if four:
            run_trainers(4, prove, running, four)


def files_of(payload: Payload) -> list[Path]:
    return sorted(Path(str(payload["folder"])).iterdir())


def previous(payload: Payload) -> Path:
    """Folder of the version before: it stays until all engines have the new one."""
    folder = Path(str(payload["folder"]))
    return folder.with_name(f"policy_{int(folder.name.removeprefix('policy_')) - 1}")


def values_start(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def flip_a_bit(payload: Payload, *, seed: int) -> None:
    """One random bit of all values of the version."""
    chance = random.Random(seed)
    files = files_of(payload)
    sizes = [path.stat().st_size - values_start(path) for path in files]
    (path,) = chance.choices(files, sizes)
    place = chance.randrange(values_start(path), path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def lose_a_file(payload: Payload) -> None:
    files_of(payload)[-1].unlink()


def cut_a_file(payload: Payload) -> None:
    path = files_of(payload)[0]
    os.truncate(path, path.stat().st_size - 4)


def lose_a_bucket(payload: Payload) -> None:
    """The last bucket of a file goes, the rest is in order."""
    path = files_of(payload)[0]
    start = values_start(path)
    content = path.read_bytes()
    header = json.loads(content[8:start])
    last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    end = header.pop(last)["data_offsets"][0]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[start : start + end])


def exchange_two_files(payload: Payload) -> None:
    """What two trainer ranks sent."""
    first, second = files_of(payload)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def bring_the_previous_files(payload: Payload) -> None:
    for path in files_of(payload):
        shutil.copyfile(previous(payload) / path.name, path)


def disguise_a_previous_file(payload: Payload) -> None:
    """Old values behind the new version's header."""
    path = files_of(payload)[0]
    old, start = previous(payload) / path.name, values_start(path)
    assert path.stat().st_size - start == old.stat().st_size - values_start(old)
    path.write_bytes(path.read_bytes()[:start] + old.read_bytes()[values_start(old) :])


def name_the_previous_folder(payload: Payload) -> None:
    payload["folder"] = str(previous(payload))


def name_a_folder_elsewhere(payload: Payload) -> None:
    payload["folder"] = "/dev/shm"


def claim_another_version(payload: Payload) -> None:
    payload["policy_version"] = 7_000


A_TENSOR = r"does not hold the weights.*: model\.\S+ on rank [01] has"
OTHER_VERSION = r"from_0_to_0\.safetensors in \S+ is of policy_version '\d+', expected is"
FILE_DAMAGE: list[tuple[Damage, str]] = [
    *((partial(flip_a_bit, seed=seed), A_TENSOR) for seed in range(FLIPS)),
    (lose_a_file, r"is missing: there is no from_1_to_0\.safetensors"),
    (cut_a_file, r"from_0_to_0\.safetensors in \S+ is cut short or damaged"),
    (lose_a_bucket, r"bucket \d+ of trainer rank 0 is missing in from_0_to_0\.safetensors"),
    (exchange_two_files, rf"{A_TENSOR}|from_[01]_to_0\.safetensors of \S+, planned are \d+ bytes"),
    (bring_the_previous_files, OTHER_VERSION),
    (disguise_a_previous_file, A_TENSOR),
    (name_the_previous_folder, OTHER_VERSION),
    (name_a_folder_elsewhere, r"are not in .*the directory that init_weight_transfer_engine named"),
    (claim_another_version, OTHER_VERSION + " .*7000"),
]


def attempt(trainer: Trainer, damage: Damage | None) -> str:
    """An update to new weights with damage between writing and reading; what stopped it."""
    trainer.policy_version += 1
    change_weights(trainer, 1.001)
    prepare, payload_of = trainer.bridge.prepare, trainer.bridge.payload
    told: list[Payload] = []

    def damaged(version: int) -> Payload:
        payload = dict(prepare(version))
        if damage is not None and trainer.parallel.rank == 0:
            damage(payload)
        told.append(payload)
        return payload

    trainer.bridge.prepare = damaged  # type: ignore[assignment,method-assign]
    trainer.bridge.payload = lambda: told[0] if told else payload_of()
    try:
        trainer.sync_weights()
    except (EngineError, RuntimeError) as error:
        return str(error)
    finally:
        trainer.bridge.prepare = prepare  # type: ignore[method-assign]
        trainer.bridge.payload = payload_of  # type: ignore[method-assign]
    return ""


def check_nothing_is_served(trainer: Trainer, endpoint: str) -> None:
    """On rank 0, after an update that failed: neither the run nor anybody else gets a token."""
    assert trainer.rollouts is not None
    with pytest.raises(EngineError, match="restart the engine"):
        trainer.rollouts.collect(1, trainer.policy_version)
    assert stamp(endpoint) != str(trainer.policy_version)
    assert not answers(endpoint)


def spoil_files(rank: int, world: int, scene: Scene, damages: list[tuple[Damage, str]]) -> None:
    """Every damage fails its update; the next good one brings the engine back."""
    (endpoint,) = scene.endpoints
    layout = ("parallel.tensor=2", "resharding.probe_tokens=0", "rollout.max_restarts=0")
    with opened_trainer(rank, world, scene, *layout) as trainer:
        trainer.sync_weights()
        for damage, words in damages:
            stopped_by = attempt(trainer, damage)
            if rank == 0:
                assert re.search(words, stopped_by), f"{damage}: {stopped_by!r}"
                check_nothing_is_served(trainer, endpoint)
                connect_again(trainer)
        expected = record_expected(trainer)
        assert attempt(trainer, None) == ""
        export(trainer, trainer.config.run_dir / "good")
        if rank == 0:
            good = trainer.config.run_dir / "good"
            check_engine(trainer, endpoint, expected[-1], good, trainer.policy_version)


def test_every_damaged_file_is_named_and_nothing_of_it_is_served(scene: Scene) -> None:
    run_trainers(2, spoil_files, scene, FILE_DAMAGE)


@pytest.mark.slow
def test_a_part_that_only_one_of_two_workers_misses_is_never_served(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    with running_engines(make_start(tmp_path, "qwen2_tied"), tensor=2) as running:
        run_trainers(2, spoil_files, running, FILE_DAMAGE[:FLIPS])
        run_trainers(2, lose_for_one_worker, running)


def lose_the_first_workers_file(payload: Payload) -> None:
    files_of(payload)[0].unlink()


def lose_for_one_worker(rank: int, world: int, scene: Scene) -> None:
    """vLLM asks its workers in order, and leaves the answers behind one that failed unread.

    So an engine whose last worker fails takes the next update. One whose first worker fails is
    over: it would give every later caller the answers of the call before.
    """
    (endpoint,) = scene.endpoints
    layout = ("parallel.tensor=2", "resharding.probe_tokens=0", "rollout.max_restarts=0")
    with opened_trainer(rank, world, scene, *layout) as trainer:
        trainer.sync_weights()
        for damage, name in ((lose_a_file, "1_to_1"), (lose_the_first_workers_file, "0_to_0")):
            assert attempt(trainer, None) == ""
            stopped_by = attempt(trainer, damage)
            if rank == 0:
                assert f"there is no from_{name}.safetensors" in stopped_by, stopped_by
                check_nothing_is_served(trainer, endpoint)
                if damage is lose_a_file:
                    connect_again(trainer)
        if rank == 0:
            with pytest.raises(EngineError, match="Start the engine again"):
                connect_again(trainer)
            assert not answers(endpoint)


def skip_a_message(trainer: Trainer) -> None:
    """The last message of this rank never leaves."""
    outbox = trainer.bridge.outbox
    messages = outbox._messages
    outbox.__dict__["_messages"] = messages[:-1]


def flip_a_bit_on_the_way(trainer: Trainer) -> None:
    """After its digest was taken."""
    outbox = trainer.bridge.outbox
    pack, last = outbox.pack, outbox._messages[-1]

    def flipping(message: Message, out: Tensor) -> None:
        pack(message, out)
        if message is last:
            out[out.numel() // 2] ^= 4

    outbox.pack = flipping  # type: ignore[method-assign]


def send_under_an_old_version(trainer: Trainer) -> None:
    sender = trainer.bridge._sender
    send = sender.send

    def stale(version: int, outbox: Outbox, engines: tuple[int, ...]) -> None:
        send(version - 1, outbox, engines)

    sender.send = stale  # type: ignore[method-assign]


def send_nothing(trainer: Trainer) -> None:
    """This rank joins the others and then says nothing."""
    trainer.bridge.outbox.__dict__["_messages"] = ()


WIRE_DAMAGE: list[tuple[Callable[[Trainer], None], str]] = [
    (flip_a_bit_on_the_way, A_TENSOR),
    (
        send_under_an_old_version,
        r"a message says version \d+, bucket \d+, trainer rank 1; expected",
    ),
    (skip_a_message, r"bucket \d+ of the new weights did not come from trainer rank 1"),
    (send_nothing, r"bucket \d+ of the new weights did not come from trainer rank 1"),
]


def spoil_messages(rank: int, world: int, scene: Scene) -> None:
    """Point to point; rank 1 is at fault. Its updates fail, the next good one succeeds."""
    (endpoint,) = scene.endpoints
    layout = ("parallel.pipeline=2", "resharding.probe_tokens=0")
    quick = ("resharding.transport=gloo", "resharding.timeout_seconds=6")
    with opened_trainer(rank, world, scene, *layout, *quick) as trainer:
        trainer.sync_weights()
        for damage, words in WIRE_DAMAGE:
            outbox, sender = trainer.bridge.outbox, trainer.bridge._sender
            kept = dict(outbox.__dict__), dict(sender.__dict__)
            if rank == 1:
                damage(trainer)
            stopped_by = [attempt(trainer, None)]
            outbox.__dict__.pop("pack", None)
            sender.__dict__.pop("send", None)
            outbox.__dict__["_messages"] = kept[0]["_messages"]
            if rank == 0:
                stopped_by += end_update(trainer)
                assert re.search(words, " ".join(stopped_by)), f"{damage}: {stopped_by}"
                check_nothing_is_served(trainer, endpoint)
                connect_again(trainer)
            dist.barrier()
            trainer.bridge.rejoin(0)
        expected = record_expected(trainer)
        assert attempt(trainer, None) == ""
        export(trainer, trainer.config.run_dir / "good")
        if rank == 0:
            good = trainer.config.run_dir / "good"
            check_engine(trainer, endpoint, expected[-1], good, trainer.policy_version)


def end_update(trainer: Trainer) -> list[str]:
    """What the engines say of an update whose sending has failed already. On rank 0."""
    assert trainer.rollouts is not None
    if trainer.rollouts._fleet._update is None:
        return []
    with pytest.raises(EngineError) as caught:
        trainer.rollouts.finish_update(None)
    return [str(caught.value)]


@pytest.mark.slow
def test_every_damaged_message_is_named_and_nothing_of_it_is_served(scene: Scene) -> None:
    run_trainers(2, spoil_messages, scene)


ORDERS: list[list[tuple[str, bool]]] = [
    [("/update_weights", False)],
    [("/finish_weight_update", False)],
    [("/start_weight_update", True), ("/finish_weight_update", False)],
    [("/start_weight_update", False), ("/update_weights", True), ("/update_weights", True)],
    [("/finish_weight_update", True), ("/finish_weight_update", False), ("/update_weights", False)],
]
"""Requests in a row, and which of them the engine takes; the stamp stays the old one's."""


def confuse(rank: int, world: int, scene: Scene) -> None:
    """Steps of an update in wrong orders, by the trainer and by somebody else."""
    (endpoint,) = scene.endpoints
    layout = ("parallel.tensor=2", "resharding.probe_tokens=0")
    with opened_trainer(rank, world, scene, *layout) as trainer:
        trainer.sync_weights()
        with pytest.raises(RuntimeError, match="version 9 is to be sent, 0 was prepared"):
            trainer.bridge.send(9)
        change_weights(trainer, 1.001)
        payload = trainer.bridge.prepare(1)
        if rank == 0:
            assert trainer.rollouts is not None
            with pytest.raises(RuntimeError, match="start_update comes first"):
                trainer.rollouts.finish_update(None)
            ask_engine(endpoint, "POST", "/pause?mode=wait&clear_cache=false")
            for order in ORDERS:
                for path, taken in order:
                    body = {"update_info": dict(payload)} if "update_w" in path else {}
                    answer = ask_engine(endpoint, "POST", path, body)
                    assert answer.is_success == taken, f"{path} in {order}: {answer.text}"
                    assert not answers(endpoint)
                    assert stamp(endpoint) == "0"
        dist.barrier()
        expected = record_expected(trainer)
        assert attempt(trainer, None) == ""
        export(trainer, trainer.config.run_dir / "good")
        if rank == 0:
            check_engine(trainer, endpoint, expected[-1], trainer.config.run_dir / "good", 1)


def test_steps_in_a_wrong_order_bring_no_mixed_weights(scene: Scene) -> None:
    run_trainers(2, confuse, scene)


UPDATES = 50
CLIENTS = 4
MOST_GROWTH_MB = 24


def update_under_load(rank: int, world: int, scene: Scene) -> None:
    """Fifty planned updates while requests keep coming, in both modes."""
    for in_flight in ("wait", "keep"):
        overrides = ("parallel.tensor=2", f"resharding.in_flight={in_flight}")
        with opened_trainer(rank, world, scene, *overrides) as trainer:
            trainer.sync_weights()
            load = Load.start(trainer) if rank == 0 else None
            for update in range(UPDATES):
                trainer.policy_version += 1
                change_weights(trainer, 1.001 if update % 2 else 1 / 1.001)
                trainer.sync_weights()
                if load is not None:
                    load.updated()
                dist.barrier()
            if load is not None:
                load.check(mixed=in_flight == "keep")


@dataclass
class Load:
    """Clients of the run's own engine, in the thread of its event loop."""

    trainer: Trainer
    results: list[tuple[int, GenerationRequest, GenerationResult]] = field(default_factory=list)
    """With the version that was current when the request was made."""
    asked: int = 0
    stopped: bool = False
    clients: Future[list[None]] | None = None
    megabytes: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, trainer: Trainer) -> Load:
        load = cls(trainer)
        assert trainer.rollouts is not None
        load.clients = trainer.rollouts._fleet._loop.submit(load._run())
        return load

    async def _run(self) -> list[None]:
        return await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        assert self.trainer.rollouts is not None
        (engine,) = self.trainer.rollouts._fleet.engines
        while not self.stopped:
            number, self.asked = self.asked, self.asked + 1
            prompt = (number % 200 + 3, number // 200 + 3)
            asked = request(prompt, number, max_tokens=24, stop_token_ids=())
            before = int(engine._installed[-1])
            self.results.append((before, asked, await engine.generate(asked)))

    def updated(self) -> None:
        """Wait for some answers, and look at the memory of engine and trainer."""
        assert self.clients is not None
        done = len(self.results)
        while len(self.results) < done + CLIENTS // 2 and not self.clients.done():
            time.sleep(0.005)
        owner = psutil.Process(os.getppid())
        processes = [psutil.Process(), *owner.children(recursive=True)]
        self.megabytes.append(sum(p.memory_info().rss for p in processes) / 2**20)

    def check(self, *, mixed: bool) -> None:
        """Every request answered once, by weights no older than those of its time."""
        assert self.clients is not None
        self.stopped = True
        self.clients.result()
        identities = [asked.request_id for _, asked, _ in self.results]
        assert len(set(identities)) == len(identities) == self.asked >= UPDATES * CLIENTS // 2
        for before, asked, result in self.results:
            versions = [version for _, version in result.version_spans]
            assert len(result.token_ids) == len(result.logprobs) == asked.max_tokens
            assert versions == sorted(set(versions))
            assert before <= versions[0] == result.policy_version
            assert versions[-1] <= self.trainer.policy_version
        assert any(len(result.version_spans) > 1 for *_, result in self.results) == mixed
        seen = {version for *_, result in self.results for _, version in result.version_spans}
        assert len(seen) >= UPDATES
        early, late = self.megabytes[15:25], self.megabytes[-10:]
        assert max(late) <= max(early) + MOST_GROWTH_MB, self.megabytes


@pytest.mark.slow
def test_fifty_updates_under_load_lose_double_and_mislabel_nothing(scene: Scene) -> None:
    run_trainers(2, update_under_load, scene)
