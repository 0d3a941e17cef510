"""Messages on random layouts: what is packed by all senders is what every engine rank must hold."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dapo.resharding.digest import as_matrix, parameter_digest
from megatron_dapo.resharding.messages import DTYPES, Message, Outbox, unpack
from megatron_dapo.resharding.plan import EngineLayout, ReshardPlan, TrainLayout, build_plan
from tests.unit.resharding.layouts import (
    Case,
    cases,
    numbered,
    train_parameters,
    vllm_parameters,
)

RANDOM_LAYOUTS = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def plan_of(case: Case) -> ReshardPlan:
    return build_plan(case.train, case.engine, case.family, bucket_bytes=case.bucket_bytes)


def outboxes_of(case: Case, plan: ReshardPlan) -> list[Outbox]:
    tensors = numbered(case.family)
    return [
        Outbox(plan, rank, train_parameters(case, tensors, rank))
        for rank in range(case.train.world_size)
    ]


def packed(outbox: Outbox, message: Message) -> torch.Tensor:
    out = torch.full((message.num_bytes,), 255, dtype=torch.uint8)
    outbox.pack(message, out)
    return out


@RANDOM_LAYOUTS
@given(case=cases(), data=st.data())
def test_packed_messages_fill_an_engine_rank_and_their_digests_add_up(
    case: Case, data: st.DataObject
) -> None:
    plan, dtype = plan_of(case), DTYPES[case.engine.dtype]
    receiver = data.draw(st.integers(0, case.engine.tensor - 1))
    wanted = vllm_parameters(case, numbered(case.family), receiver)
    held = {name: torch.zeros(value.shape, dtype=dtype) for name, value in wanted.items()}
    digests = dict.fromkeys(wanted, 0)
    for outbox in outboxes_of(case, plan):
        for message in outbox:
            if message.receiver != receiver:
                continue
            assert message.num_bytes == plan.message_bytes(message.bucket, outbox.sender, receiver)
            transfers = plan.message(message.bucket, outbox.sender, receiver)
            for transfer, values in unpack(packed(outbox, message), transfers, dtype):
                box = transfer.target_box
                target = as_matrix(held[transfer.target])
                target[box.row : box.row + box.rows, box.col : box.col + box.cols] = values
        for name, part in outbox.partial_digests(receiver).items():
            digests[name] += part
    for name, value in wanted.items():
        assert torch.equal(held[name], value.to(dtype)), name
        words = plan.word_bytes(name)
        assert (digests[name] - int(parameter_digest(held[name], word_bytes=words))) % 2**64 == 0


@RANDOM_LAYOUTS
@given(case=cases())
def test_a_batch_is_never_larger_than_a_bucket(case: Case) -> None:
    plan = plan_of(case)
    rows = (shape[-1] for shape in case.family.hf_tensors.values())
    limit = max(case.bucket_bytes, max(rows) * case.engine.item_bytes)
    for rank in range(case.train.world_size):
        outbox = Outbox(plan, rank, {})
        batches = outbox.batches(case.bucket_bytes)
        assert [message for batch in batches for message in batch] == list(outbox)
        for batch in batches:
            assert sum(message.num_bytes for message in batch) <= limit
            assert len({message.bucket for message in batch}) == 1


def small_case() -> Case:
    config = transformers.AutoConfig.for_model(
        "qwen2",
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=16,
        intermediate_size=24,
        vocab_size=50,
    )
    train = TrainLayout(tensor=2, padded_vocab_size=64)
    return Case(config, train, EngineLayout(tensor=2, dtype="float32"), 1000)


def test_a_message_of_another_length_is_refused() -> None:
    case = small_case()
    plan = plan_of(case)
    outbox = outboxes_of(case, plan)[0]
    message = next(iter(outbox))
    whole = packed(outbox, message)
    for wrong, text in ((whole[:-4], "ends"), (torch.cat([whole, whole[:4]]), "transfers for")):
        with pytest.raises(RuntimeError, match=text):
            list(unpack(wrong, message.transfers, outbox.dtype))


def test_a_rank_without_a_planned_parameter_says_so() -> None:
    case = small_case()
    outbox = Outbox(plan_of(case), 1, {})
    with pytest.raises(RuntimeError, match=r"rank 1 .*embed_tokens.*does not\s+hold"):
        packed(outbox, next(iter(outbox)))


def test_digests_belong_to_one_version() -> None:
    case = small_case()
    outbox = outboxes_of(case, plan_of(case))[0]
    for message in outbox:
        packed(outbox, message)
    first = outbox.partial_digests(0)
    assert first
    outbox.start()
    assert outbox.partial_digests(0) == {}
    for message in outbox:
        packed(outbox, message)
    assert outbox.partial_digests(0) == first
