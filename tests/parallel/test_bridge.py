"""The bridge under real layouts: Megatron's shards into plain engine workers, byte for byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from megatron_dapo.config.schema import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    ReshardingConfig,
    RolloutConfig,
    RunConfig,
)
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.model import build_chunks
from megatron_dapo.resharding import bridge as bridge_module
from megatron_dapo.resharding import lines
from megatron_dapo.resharding.bridge import Bridge
from megatron_dapo.resharding.load import load_hf_weights
from megatron_dapo.resharding.plan import build_plan
from megatron_dapo.resharding.private_directory import PREFIX
from megatron_dapo.resharding.transport import UpdatePayload
from tests.plain_engine import PlainWorker, vllm_tensors
from tests.ranks import run_ranks
from tests.tiny_models import FAMILIES, tiny_model

VOCAB = 500  # not a multiple of Megatron's padding, nor of vLLM's
SMALL_BUCKET = 40_000  # bytes: tensors are cut, and there are many buckets
ENGINE_TENSOR, REPLICAS = 2, 2
TIMEOUT = 300
HANG = TIMEOUT / 2
"""Nobody waits for one that is known to be lost, however slow the machine is."""
TWO_RANKS = [
    ParallelConfig(tensor=2),
    ParallelConfig(pipeline=2),
    ParallelConfig(data=2),
    ParallelConfig(pipeline=2, virtual_pipeline=2),
]
TWO_RANKS_MOE = [
    ParallelConfig(data=2, expert=2),
    ParallelConfig(tensor=2, expert_tensor=1),
]
FOUR_RANKS = [ParallelConfig(tensor=2, data=2)]
FOUR_RANKS_MOE = [ParallelConfig(tensor=2, data=2, expert=2, expert_tensor=2)]


def _write_folders(root: Path) -> None:
    for family in FAMILIES:
        tiny_model(family, hidden_size=64, intermediate_size=96, vocab_size=VOCAB).save_pretrained(
            root / family
        )


def _config(
    folder: Path,
    layout: ParallelConfig,
    transport: str,
    engine_dtype: str = "auto",
    quantization: Literal["fp8"] | None = None,
) -> RunConfig:
    return RunConfig(
        run_dir=folder,
        model=ModelConfig(path=folder, dtype="float32"),
        data=DataConfig(train=folder / "none.jsonl"),
        parallel=layout,
        rollout=RolloutConfig(
            engine_tensor=ENGINE_TENSOR,
            engines=REPLICAS,
            engine_dtype=engine_dtype,  # type: ignore[arg-type]
            engine_quantization=quantization,
        ),
        resharding=ReshardingConfig(transport=transport, timeout_seconds=TIMEOUT),  # type: ignore[arg-type]
    )


@dataclass
class _Run:
    """One layout on all ranks, and on rank 0 two engines whose workers are threads."""

    config: RunConfig
    hf_config: transformers.PretrainedConfig
    parallel: ParallelContext
    bridge: Bridge
    workers: list[list[PlainWorker]]
    pool: ThreadPoolExecutor
    said: list[RuntimeError]
    """What an engine answers to the rollouts on rank 0."""

    def take(self, payload: UpdatePayload, engines: range = range(REPLICAS)) -> list[Future[None]]:
        """Every worker of these engines starts to receive."""
        return [
            self.pool.submit(worker.weights.receive, payload)
            for engine in engines
            if self.workers
            for worker in self.workers[engine]
        ]

    def sync(self, version: int) -> list[dict[str, str]] | None:
        payload = self.bridge.prepare(version)
        receiving = self.take(payload)
        self.bridge.send(version)
        for future in receiving:
            future.result()
        return self.bridge.expected_digests()

    def start_engine(self, engine: int) -> list[PlainWorker]:
        info = self.bridge.init_info(engine)
        return [PlainWorker(info, self.hf_config, rank) for rank in range(ENGINE_TENSOR)]


@contextmanager
def _running(config: RunConfig, parent: Path) -> Iterator[_Run]:
    hf_config = transformers.AutoConfig.from_pretrained(config.model.path)
    parallel = ParallelContext.create(config.parallel, seed=1)
    chunks = build_chunks(config, hf_config, parallel)
    load_hf_weights(chunks, hf_config, config.model.path, parallel)
    said: list[RuntimeError] = []
    failure = (lambda: said[0] if said else None) if parallel.rank == 0 else None
    bridge = Bridge.open(config, chunks, hf_config, parallel, directory=parent, failure=failure)
    with ThreadPoolExecutor(ENGINE_TENSOR * REPLICAS) as pool:
        run = _Run(config, hf_config, parallel, bridge, [], pool, said)
        if parallel.rank == 0:
            run.workers = [run.start_engine(engine) for engine in range(REPLICAS)]
        yield run
    for worker in (worker for engine in run.workers for worker in engine):
        worker.weights.close()
    bridge.close()
    dist.barrier()
    assert not list(parent.glob(f"{PREFIX}*"))
    parallel.destroy()


def _assert_holds_the_folder(run: _Run, expected: list[dict[str, str]] | None) -> None:
    """Bytes as vLLM's loaders lay them out, and digests as the trainers expect them."""
    assert (expected is None) == (run.parallel.rank != 0)
    if expected is None:
        return
    stored = load_file(run.config.model.path / "model.safetensors")
    for engine in run.workers:
        for rank, worker in enumerate(engine):
            wanted = vllm_tensors(stored, run.hf_config, ENGINE_TENSOR, rank)
            assert worker.tensors.keys() == wanted.keys()
            for name, tensor in worker.tensors.items():
                assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
            assert worker.weights.digests() == expected[rank]
            held = worker.weights.receiver.staging_bytes
            assert held <= 2 * SMALL_BUCKET * 1.1, held


def _updates(folder: Path, layout: ParallelConfig, transport: str, dtype: str = "auto") -> None:
    with _running(_config(folder, layout, transport, dtype), folder.parent) as run:
        _assert_holds_the_folder(run, run.sync(1))
        for parameter in run.bridge.outbox.sources.values():
            parameter.data += 1
        expected = run.sync(2)
        assert run.bridge.staging_bytes <= 2 * SMALL_BUCKET * 1.1
        for parameter in run.bridge.outbox.sources.values():
            parameter.data -= 1
        if expected is not None:
            for engine in run.workers:
                for rank, worker in enumerate(engine):
                    assert worker.weights.digests() == expected[rank]
                    norm = worker.tensors["model.norm.weight"].float()
                    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
                    torch.testing.assert_close(norm, stored + 1, rtol=1e-2, atol=1e-2)
        run.bridge.acknowledged(2)


def _an_engine_that_comes_late_gets_the_current_weights(folder: Path, transport: str) -> None:
    config = _config(folder, ParallelConfig(tensor=2), transport)
    with _running(config, folder.parent) as run:
        expected = run.sync(5)
        run.bridge.rejoin(1)
        if run.parallel.rank == 0:
            for worker in run.workers[1]:
                worker.weights.close()
            run.workers[1] = run.start_engine(1)
        receiving = run.take(run.bridge.payload(), range(1, 2))
        run.bridge.send(5, [1])
        for future in receiving:
            future.result()
        _assert_holds_the_folder(run, expected)
        _assert_holds_the_folder(run, run.sync(6))


def _one_trainer_with_other_weights_is_found(folder: Path, transport: str) -> None:
    """A bit changes on the way from rank 1: digests of one parameter on the ranks it reaches."""
    config = _config(folder, ParallelConfig(pipeline=2), transport)
    with _running(config, folder.parent) as run:
        if run.parallel.rank == 1:
            pack = run.bridge.outbox.pack
            last = [m for m in run.bridge.outbox if m.receiver == 1][-1]

            def damaging(message, out):  # type: ignore[no-untyped-def]
                pack(message, out)
                if message is last:
                    out[-1] ^= 1

            run.bridge.outbox.pack = damaging  # type: ignore[method-assign]
        expected = run.sync(1)
        if expected is not None:
            for engine in run.workers:
                found = [worker.weights.digests() for worker in engine]
                assert found[0] == expected[0]
                wrong = [name for name in found[1] if found[1][name] != expected[1][name]]
                assert wrong == ["lm_head.weight"]


def _a_dead_engine_ends_the_update_on_every_rank_that_waits_for_it(folder: Path) -> None:
    config = _config(folder, ParallelConfig(tensor=2), "gloo")
    with _running(config, folder.parent) as run:
        run.sync(1)
        payload = run.bridge.prepare(2)
        receiving = run.take(payload, range(1))
        for worker in run.workers[1] if run.workers else []:
            worker.weights.close()
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank \d of engine 1 (did not take|cannot be)"):
            run.bridge.send(2)
        for future in receiving:  # what the living one got is not all
            assert "did not come from trainer rank" in str(future.exception())
        assert time.monotonic() - started < HANG  # nobody waited for the dead
        assert run.bridge.payload()["generations"] == [1, 1]
        _assert_holds_the_folder(run, run.sync(3))


def _an_engine_that_refuses_is_heard_on_every_rank_at_once(folder: Path) -> None:
    config = _config(folder, ParallelConfig(tensor=2), "gloo")
    with _running(config, folder.parent) as run:
        payload = run.bridge.prepare(1)
        receiving = run.take(payload, range(1))  # and engine 1 never comes
        refusal = RuntimeError("rollout engine 1 answered 400: it has another plan")
        run.said.append(refusal)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="engine 1 answered 400") as caught:
            run.bridge.send(1)
        assert time.monotonic() - started < HANG
        assert (caught.value is refusal) == (run.parallel.rank == 0)
        assert all(isinstance(future.exception(), RuntimeError) for future in receiving)
        run.said.clear()
        _assert_holds_the_folder(run, run.sync(2))


def _an_engine_that_fails_at_the_very_end_ends_the_update_on_every_rank(folder: Path) -> None:
    """All messages are out, but the others were told not to wait: that must not outlive it."""
    config = _config(folder, ParallelConfig(tensor=2), "gloo")
    with _running(config, folder.parent) as run:
        sender, heard = run.bridge._sender, threading.Event()
        send, call_off = sender.send, sender.call_off
        refusal = RuntimeError("rollout engine 1 answered 500: its kernel takes no such weights")

        def hear(*arguments):  # type: ignore[no-untyped-def]
            call_off(*arguments)
            heard.set()

        def send_and_hear(*arguments):  # type: ignore[no-untyped-def]
            send(*arguments)
            run.said.append(refusal)
            assert heard.wait(HANG)

        sender.call_off = hear  # type: ignore[method-assign]
        sender.send = send_and_hear  # type: ignore[method-assign]
        if run.parallel.rank != 0:
            heard.set()  # engines answer to rank 0
        payload = run.bridge.prepare(1)
        receiving = run.take(payload)
        wanted = "answered 500" if run.parallel.rank == 0 else "trainer rank 0 could not send"
        with pytest.raises(RuntimeError, match=wanted):
            run.bridge.send(1)
        sender.send, sender.call_off = send, call_off  # type: ignore[method-assign]
        assert [future.exception() for future in receiving] == [None] * len(receiving)
        assert run.bridge.payload()["generations"] == [1, 1]
        run.said.clear()
        _assert_holds_the_folder(run, run.sync(2))


def _a_rank_that_is_done_waits_for_one_that_writes_for_long(folder: Path) -> None:
    config = _config(folder, ParallelConfig(tensor=2), "files")
    short = config.resharding.model_copy(update={"timeout_seconds": 1})
    config = config.model_copy(update={"resharding": short})
    with _running(config, folder.parent) as run:
        if run.parallel.rank == 1:
            pack = run.bridge.outbox.pack
            first = next(iter(run.bridge.outbox))

            def slow(message, out):  # type: ignore[no-untyped-def]
                if message is first:
                    time.sleep(3)
                pack(message, out)

            run.bridge.outbox.pack = slow  # type: ignore[method-assign]
        _assert_holds_the_folder(run, run.sync(1))


def _what_one_rank_does_not_hold_stops_all_ranks(folder: Path, transport: str) -> None:
    config = _config(folder, ParallelConfig(tensor=2), transport)
    with _running(config, folder.parent) as run:
        if run.parallel.rank == 1:
            run.bridge.outbox.sources = {}
        wanted = "which it does not hold" if run.parallel.rank == 1 else "rank 1"
        started = time.monotonic()
        receiving: list[Future[None]] = []
        with pytest.raises(RuntimeError, match=wanted):
            receiving = run.take(run.bridge.prepare(1))
            run.bridge.send(1)
        assert all(isinstance(future.exception(), RuntimeError) for future in receiving)
        assert time.monotonic() - started < HANG


def _a_full_disk_stops_all_ranks(folder: Path) -> None:
    config = _config(folder, ParallelConfig(tensor=2), "files")
    with _running(config, folder.parent) as run:
        if run.parallel.rank == 1:
            write = bridge_module.FileSender.prepare.__globals__["write_messages"]

            def failing(folder, version, outbox):  # type: ignore[no-untyped-def]
                raise OSError(28, "No space left on device")

            bridge_module.FileSender.prepare.__globals__["write_messages"] = failing
        with pytest.raises(RuntimeError, match="rank 1: No space left on device"):
            run.bridge.prepare(1)
        if run.parallel.rank == 1:
            bridge_module.FileSender.prepare.__globals__["write_messages"] = write
        _assert_holds_the_folder(run, run.sync(1))


def _small() -> None:
    """Buckets and stripes for tiny models."""
    lines.MESSAGE_BYTES, lines.ROWS_PER_STRIPE = 1024, 25

    def small_plan(train, engine, family, *, bucket_bytes):  # type: ignore[no-untyped-def]
        return build_plan(train, engine, family, bucket_bytes=SMALL_BUCKET)

    bridge_module.build_plan = small_plan


def _walk_two_ranks(rank: int, world: int, root: Path) -> None:
    _small()
    for transport in ("files", "gloo"):
        for family in FAMILIES:
            layouts = TWO_RANKS_MOE if family == "qwen3_moe" else TWO_RANKS
            for layout in layouts if transport == "files" else layouts[:2]:
                _updates(root / family, layout, transport)
        _updates(root / "qwen2", ParallelConfig(tensor=2), transport, "bfloat16")
        _an_engine_that_comes_late_gets_the_current_weights(root / "qwen3", transport)
        _one_trainer_with_other_weights_is_found(root / "qwen3", transport)
    _a_dead_engine_ends_the_update_on_every_rank_that_waits_for_it(root / "qwen2")
    _an_engine_that_refuses_is_heard_on_every_rank_at_once(root / "qwen2")
    _an_engine_that_fails_at_the_very_end_ends_the_update_on_every_rank(root / "qwen2")
    _a_rank_that_is_done_waits_for_one_that_writes_for_long(root / "qwen2")
    _a_full_disk_stops_all_ranks(root / "qwen2")
    for transport in ("files", "gloo"):
        _what_one_rank_does_not_hold_stops_all_ranks(root / "qwen2", transport)


def _walk_four_ranks(rank: int, world: int, root: Path) -> None:
    _small()
    for layout in FOUR_RANKS:
        _updates(root / "qwen3", layout, "gloo")
    for layout in FOUR_RANKS_MOE:
        _updates(root / "qwen3_moe", layout, "files")


def test_two_ranks_bring_every_byte_to_every_engine_and_every_fault_to_light(
    tmp_path: Path,
) -> None:
    _write_folders(tmp_path)
    run_ranks(2, _walk_two_ranks, tmp_path)


def test_four_ranks_bring_every_byte_to_every_engine(tmp_path: Path) -> None:
    _write_folders(tmp_path)
    run_ranks(4, _walk_four_ranks, tmp_path)
