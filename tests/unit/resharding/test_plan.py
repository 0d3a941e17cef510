"""The plan on random layouts: it is executed on models of numbered elements."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dapo.resharding import lines
from megatron_dapo.resharding.boxes import Box
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import (
    EngineLayout,
    ReshardPlan,
    TrainLayout,
    Transfer,
    build_plan,
)
from tests.unit.resharding.layouts import (
    Case,
    cases,
    matrix_box,
    numbered,
    train_parameters,
    vllm_parameters,
)

RANDOM_LAYOUTS = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(autouse=True, scope="module")
def small_messages() -> Iterator[None]:
    """Tiny models are cut into as many stripes as large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "MESSAGE_BYTES", 16)
        patch.setattr(lines, "ROWS_PER_STRIPE", 25)
        yield


def plan_of(case: Case) -> ReshardPlan:
    return build_plan(case.train, case.engine, case.family, bucket_bytes=case.bucket_bytes)


@RANDOM_LAYOUTS
@given(case=cases(), data=st.data())
def test_every_engine_byte_is_written_once_by_a_rank_that_holds_it(
    case: Case, data: st.DataObject
) -> None:
    plan, tensors = plan_of(case), numbered(case.family)
    receiver = data.draw(st.integers(0, case.engine.world_size - 1))
    held = cache(lambda rank: train_parameters(case, tensors, rank))
    expected = vllm_parameters(case, tensors, receiver % case.engine.tensor)
    shapes = {name: tuple(value.shape) for name, value in expected.items()}
    assert plan.parameters(receiver) == shapes
    written = {name: torch.full(shape, -1) for name, shape in shapes.items()}
    times = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for transfer in plan.transfers_to(receiver):
        assert transfer.receiver == receiver
        values = matrix_box(held(transfer.sender)[transfer.source], transfer.source_box)
        matrix_box(written[transfer.target], transfer.target_box).copy_(values)
        matrix_box(times[transfer.target], transfer.target_box).add_(1)
        assert (torch.isin(values, tensors[transfer.tensor])).all()
    for name, box in plan.padding(receiver):
        matrix_box(written[name], box).zero_()
        matrix_box(times[name], box).add_(1)
    for name, value in expected.items():
        assert (times[name] == 1).all(), name
        assert torch.equal(written[name], value), name


@RANDOM_LAYOUTS
@given(case=cases())
def test_both_sides_list_the_same_messages_in_the_same_order(case: Case) -> None:
    plan = plan_of(case)
    of_senders = defaultdict(list)
    of_receivers = defaultdict(list)
    for sender in range(case.train.world_size):
        for transfer in plan.transfers_from(sender):
            of_senders[transfer.bucket, sender, transfer.receiver].append(transfer)
    for receiver in range(case.engine.tensor):
        for transfer in plan.transfers_to(receiver):
            of_receivers[transfer.bucket, transfer.sender, receiver].append(transfer)
    assert of_senders == of_receivers
    for (bucket, sender, receiver), transfers in list(of_senders.items())[:20]:
        assert plan.message(bucket, sender, receiver) == transfers
        size = sum(t.target_box.elements for t in transfers) * case.engine.item_bytes
        assert plan.message_bytes(bucket, sender, receiver) == size
        assert plan.message_sizes(bucket, receiver)[sender] == size
        assert sender in plan.senders_of(bucket, receiver)


@RANDOM_LAYOUTS
@given(case=cases())
def test_buckets_come_in_order_and_bound_what_a_rank_receives_of_each(case: Case) -> None:
    plan = plan_of(case)
    widest = max(shape[-1] for shape in case.family.hf_tensors.values())
    limit = max(case.bucket_bytes, widest * case.engine.item_bytes)
    received: dict[int, int] = defaultdict(int)
    previous = 0
    for transfer in plan.transfers_to(0):
        assert transfer.bucket >= previous
        previous = transfer.bucket
        received[transfer.bucket] += transfer.target_box.elements * case.engine.item_bytes
    assert previous < plan.num_buckets
    assert max(received.values()) <= limit


@RANDOM_LAYOUTS
@given(case=cases())
def test_totals_are_the_sums_of_the_transfers(case: Case) -> None:
    plan, item, replicas = plan_of(case), case.engine.item_bytes, case.engine.replicas
    sent, received = plan.bytes_by_sender(), plan.bytes_by_receiver()
    for sender in range(case.train.world_size):
        elements = sum(t.source_box.elements for t in plan.transfers_from(sender))
        assert sent[sender] == elements * item * replicas
    for receiver in range(case.engine.world_size):
        elements = sum(t.target_box.elements for t in plan.transfers_to(receiver))
        assert received[receiver] == elements * item
    assert sum(sent.values()) == sum(received.values()) == plan.bytes_moved
    owned = sum(
        math.prod(shape)
        for rank in range(case.engine.world_size)
        for shape in plan.parameters(rank).values()
    )
    padding = sum(
        box.elements for rank in range(case.engine.world_size) for _, box in plan.padding(rank)
    )
    assert plan.lower_bound == (owned - padding) * item
    assert plan.bytes_moved <= 1.05 * plan.lower_bound


@RANDOM_LAYOUTS
@given(case=cases())
def test_replicas_of_a_shard_send_equally_much(case: Case) -> None:
    plan = plan_of(case)
    for shard, sent in plan.bytes_by_replica():
        assert len(sent) == case.train.replicas(shard)
        rows = 2 * plan.widest_row_bytes(shard)
        assert max(sent) - min(sent) <= max(0.1 * max(sent), rows), shard


@RANDOM_LAYOUTS
@given(case=cases())
def test_no_box_cuts_a_word_of_a_parameter(case: Case) -> None:
    plan, item = plan_of(case), case.engine.item_bytes
    boxes: dict[str, list[Box]] = defaultdict(list)
    for receiver in range(case.engine.tensor):
        for transfer in plan.transfers_to(receiver):
            boxes[transfer.target].append(transfer.target_box)
    for target, found in boxes.items():
        word = plan.word_bytes(target)
        assert word in (1, 2, 4, 8)
        assert all(box.col * item % word == 0 == box.cols * item % word for box in found)


def dense(**sizes: int) -> transformers.PretrainedConfig:
    standard = dict(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        intermediate_size=64,
        vocab_size=100,
    )
    return transformers.AutoConfig.for_model("qwen3", **(standard | {"head_dim": 8} | sizes))


def dense_plan(bucket_bytes: int = 1000, **sizes: int) -> ReshardPlan:
    return build_plan(
        TrainLayout(tensor=2, padded_vocab_size=128),
        EngineLayout(tensor=2),
        family_for(dense(**sizes)),
        bucket_bytes=bucket_bytes,
    )


def test_equal_inputs_give_equal_fingerprints_and_others_do_not() -> None:
    plan = dense_plan()
    assert plan.fingerprint == dense_plan().fingerprint
    assert len(plan.fingerprint) == 16
    others = [dense_plan(bucket_bytes=999), dense_plan(intermediate_size=32)]
    assert plan.fingerprint not in {other.fingerprint for other in others}


def test_a_transfer_says_which_tensor_from_where_to_where() -> None:
    plan = dense_plan(bucket_bytes=10**6)
    found = [t for t in plan.transfers_to(1) if t.tensor == "model.layers.1.mlp.up_proj.weight"]
    assert found == [
        Transfer(
            tensor="model.layers.1.mlp.up_proj.weight",
            sender=1,
            receiver=1,
            source="model.layers.1.mlp.gate_proj.weight",
            source_box=Box(32, 32, 0, 32),
            target="model.layers.1.mlp.gate_up_proj.weight",
            target_box=Box(32, 32, 0, 32),
            bucket=0,
        )
    ]


@pytest.mark.parametrize(
    ("train", "engine", "message"),
    [
        (dict(tensor=4), {}, r"2 key/value groups .* parallel\.tensor=4"),
        (dict(pipeline=4), {}, r"2 layers cannot be cut evenly over parallel\.pipeline=4"),
        (dict(padded_vocab_size=64), {}, r"padded vocabulary of 64 rows cannot hold .* 100"),
        (dict(pipeline=1, virtual_pipeline=3), {}, r"3 chunks .*parallel\.virtual_pipeline"),
        (dict(data=0), {}, "data=0 of a trainer layout: must be at least 1"),
        ({}, dict(tensor=3), r"rollout\.engine_tensor=3 must divide .*num_attention_heads=4"),
        ({}, dict(tensor=0), r"rollout\.engine_tensor=0: must be at least 1"),
        ({}, dict(replicas=-1), r"rollout\.engines=-1: must be at least 1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_name(
    train: dict[str, int], engine: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_plan(
            TrainLayout(**({"padded_vocab_size": 128} | train)),  # type: ignore[arg-type]
            EngineLayout(**engine),  # type: ignore[arg-type]
            family_for(dense()),
            bucket_bytes=1000,
        )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "message"),
    [(6, 2, "num_attention_heads=6"), (12, 3, "num_key_value_heads=3, or be a multiple of them")],
)
def test_an_engine_holds_whole_heads_even_where_their_rows_could_be_cut(
    heads: int, kv_heads: int, message: str
) -> None:
    config = dense(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
    with pytest.raises(ValueError, match=f"rollout.engine_tensor=4 must divide .*{message}"):
        build_plan(
            TrainLayout(padded_vocab_size=128),
            EngineLayout(tensor=4),
            family_for(config),
            bucket_bytes=1000,
        )


def test_an_unknown_target_has_no_words() -> None:
    with pytest.raises(ValueError, match=r"writes no 'model\.layers\.0\.nothing'"):
        dense_plan().word_bytes("model.layers.0.nothing")
