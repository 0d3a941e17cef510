"""The figures of a plan, against its transfers and messages."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import transformers

from megatron_dapo.resharding.messages import Outbox
from megatron_dapo.resharding.name_map import Family, family_for
from megatron_dapo.resharding.plan import EngineLayout, TrainLayout, build_plan
from megatron_dapo.resharding.plan_summary import even_shares, rebuilt_bytes, summarize

TRAIN = TrainLayout(tensor=2, data=5, padded_vocab_size=1024)
EXPERTS = replace(TRAIN, data=8, expert=4, expert_tensor=1)


def model(name: str = "qwen3") -> Family:
    sizes = {"num_experts": 16, "moe_intermediate_size": 128} if name == "qwen3_moe" else {}
    config = transformers.AutoConfig.for_model(
        name,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        hidden_size=512,
        intermediate_size=1024,
        vocab_size=1000,
        tie_word_embeddings=False,
        **sizes,
    )
    return family_for(config)


@pytest.mark.parametrize(
    ("name", "train", "engine"),
    [
        ("qwen3", TRAIN, EngineLayout(tensor=2, replicas=3)),
        ("qwen3", TRAIN, EngineLayout(tensor=2, quantization="fp8")),
        ("qwen3_moe", EXPERTS, EngineLayout(tensor=4)),
    ],
)
def test_the_balance_compares_each_rank_with_its_even_share(
    name: str, train: TrainLayout, engine: EngineLayout
) -> None:
    plan = build_plan(train, engine, model(name), bucket_bytes=2**20)
    summary = summarize(plan)
    sent = {
        rank: sum(
            transfer.target_box.elements * engine.bytes_of(transfer.content)
            for transfer in plan.transfers_from(rank)
        )
        * engine.replicas
        for rank in range(train.world_size)
    }
    assert summary.bytes_by_sender == sent
    even = even_shares(plan)
    assert sum(even.values()) == pytest.approx(summary.bytes_moved)
    # Ranks that hold the same shards have the same even share: the mean of what they send.
    for first in range(train.tensor):
        alike = list(range(first, train.world_size, train.tensor * train.expert))
        mean = sum(sent[rank] for rank in alike) / len(alike)
        assert {round(even[rank], 3) for rank in alike} == {round(even[alike[0]], 3)}
        if train.expert == 1:
            assert even[alike[0]] == pytest.approx(mean)
    worst = max(sent[rank] / even[rank] for rank in sent)
    assert summary.imbalance == worst
    assert 1 <= worst < 1.2


@pytest.mark.parametrize("bucket_bytes", [1000, 100_000, 2**30])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_no_bucket_is_larger_than_the_summary_says(
    bucket_bytes: int, quantization: str | None
) -> None:
    engine = EngineLayout(tensor=2, quantization=quantization)  # type: ignore[arg-type]
    plan = build_plan(TRAIN, engine, model(), bucket_bytes=bucket_bytes)
    bound = summarize(plan).memory_bound // 2
    of_receivers = [
        sum(plan.message_sizes(bucket, receiver).values())
        for bucket in range(plan.num_buckets)
        for receiver in range(engine.tensor)
    ]
    boxes = [Outbox(plan, rank, {}) for rank in range(TRAIN.world_size)]
    batches = [batch for box in boxes for batch in box.batches(plan.bucket_bytes)]
    of_senders = [sum(message.num_bytes for message in batch) for batch in batches]
    assert max(of_receivers) <= bound
    assert max(of_senders) <= bound
    row = 1024 * 2 if quantization is None else 128 * 1024 + 8 * 4
    assert bound <= max(bucket_bytes, row)
    if bucket_bytes < 10_000:  # a row of blocks is longer than such a bucket
        assert bound > bucket_bytes


@pytest.mark.parametrize("bucket_bytes", [2**16, 2**20, 2**30])
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("qwen3", EngineLayout(tensor=2)),
        ("qwen3", EngineLayout(tensor=2, quantization="fp8")),
        ("qwen3_moe", EngineLayout(tensor=2)),
        ("qwen3_moe", EngineLayout(tensor=4, expert_parallel=True)),
    ],
)
def test_an_engine_rank_rebuilds_no_more_at_a_time_than_the_summary_says(
    bucket_bytes: int, name: str, engine: EngineLayout
) -> None:
    train = EXPERTS if name == "qwen3_moe" else TRAIN
    plan = build_plan(train, engine, model(name), bucket_bytes=bucket_bytes)
    sizes = {
        name: (math.prod(shape), engine.bytes_of(content))
        for name, content, shape in plan.map.contents(0)
        if name.startswith("model.layers")
        and "norm" not in name
        and not name.endswith("mlp.gate.weight")
    }
    missing = Counter({name: count for name, (count, _) in sizes.items()})
    opened: set[str] = set()
    most = 0
    for bucket in range(plan.num_buckets):
        for sender in plan.senders_of(bucket, 0):
            for transfer in plan.message(bucket, sender, 0):
                module = transfer.target.rpartition(".")[0]
                if transfer.target not in sizes:
                    continue
                opened.add(module)
                held = [n for n in sizes if n.rpartition(".")[0] in opened]
                most = max(most, sum(math.prod(sizes[name]) for name in held))
                missing[transfer.target] -= transfer.target_box.elements
                if not any(missing[n] for n in held if n.rpartition(".")[0] == module):
                    opened.remove(module)
    assert not opened and not +missing
    assert most <= rebuilt_bytes(plan)
    if plan.num_buckets > 1:  # else most modules close before the next one opens
        assert most >= 0.5 * rebuilt_bytes(plan)
