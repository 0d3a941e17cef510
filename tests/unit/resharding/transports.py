"""One small model on two trainer ranks and two engine workers, all in threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from torch import Tensor

from megatron_dapo.resharding.digest import as_hex
from megatron_dapo.resharding.messages import Outbox
from megatron_dapo.resharding.plan import EngineLayout, ReshardPlan, TrainLayout, build_plan
from megatron_dapo.resharding.transport import InitInfo
from tests.plain_engine import PlainWorker, vllm_tensors
from tests.unit.resharding.layouts import Case, numbered, train_parameters

BUCKET = 1000
TRAINERS = WORKERS = 2
HF_CONFIG = transformers.AutoConfig.for_model(
    "qwen2",
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_size=16,
    intermediate_size=24,
    vocab_size=50,
)
CASE = Case(
    HF_CONFIG,
    TrainLayout(tensor=TRAINERS, padded_vocab_size=64),
    EngineLayout(tensor=WORKERS, dtype="float32"),
    BUCKET,
)


def small_plan() -> ReshardPlan:
    return build_plan(CASE.train, CASE.engine, CASE.family, bucket_bytes=BUCKET)


def version_tensors(version: int) -> dict[str, Tensor]:
    """Hugging Face tensors of a version: every element of every version has its own number."""
    return {name: value + version * 0.25 for name, value in numbered(CASE.family).items()}


def outbox(rank: int, version: int = 0) -> Outbox:
    held = train_parameters(CASE, numbered(CASE.family), rank)
    sources = {key: value + version * 0.25 for key, value in held.items()}
    return Outbox(small_plan(), rank, sources)


def init_info(transport: str, directory: Path, *, timeout: float = 60.0) -> InitInfo:
    plan = small_plan()
    return InitInfo(
        transport=transport,
        directory=str(directory),
        train_layout=asdict(plan.train),
        engine_layout=asdict(plan.engine),
        bucket_bytes=BUCKET,
        fingerprint=plan.fingerprint,
        replica=0,
        timeout_seconds=timeout,
    )


def workers(transport: str, directory: Path, *, timeout: float = 60.0) -> list[PlainWorker]:
    init = init_info(transport, directory, timeout=timeout)
    return [PlainWorker(init, HF_CONFIG, rank) for rank in range(WORKERS)]


def in_parallel(*functions: Callable[[], object]) -> list[BaseException | None]:
    """Run all at once; what each raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.exception() for future in [pool.submit(f) for f in functions]]


def assert_holds(worker: PlainWorker, rank: int, version: int) -> None:
    wanted = vllm_tensors(version_tensors(version), HF_CONFIG, WORKERS, rank)
    assert worker.tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(worker.tensors[name], value.float()), name


def expected_digests(outboxes: Sequence[Outbox], rank: int) -> dict[str, str]:
    """As `Bridge.expected_digests` sums them."""
    sums = dict.fromkeys(small_plan().parameters(rank), 0)
    for box in outboxes:
        for name, part in box.partial_digests(rank).items():
            sums[name] += part
    return {name: as_hex(value) for name, value in sums.items()}
