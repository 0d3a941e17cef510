"""Plans far beyond one machine."""

from __future__ import annotations

import pytest
import transformers

from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import EngineLayout, TrainLayout, build_plan

QWEN3_235B_A22B = dict(
    num_hidden_layers=94,
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_experts=128,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=False,
)
PARAMETERS = 235_093_634_560


WIDE_EXPERTS = TrainLayout(
    tensor=4, context=2, data=32, pipeline=2, expert=32, padded_vocab_size=152064
)
CUT_EXPERTS = TrainLayout(
    tensor=4,
    data=64,
    pipeline=2,
    virtual_pipeline=47,
    expert=8,
    expert_tensor=4,
    padded_vocab_size=152064,
)


@pytest.mark.parametrize(
    ("train", "engine"),
    [
        (WIDE_EXPERTS, EngineLayout(tensor=8, replicas=8)),
        (WIDE_EXPERTS, EngineLayout(tensor=64, expert_parallel=True)),
        (CUT_EXPERTS, EngineLayout(tensor=64)),
        (CUT_EXPERTS, EngineLayout(tensor=8, replicas=8, expert_parallel=True)),
    ],
)
def test_235b_is_planned_for_512_by_64_ranks(train: TrainLayout, engine: EngineLayout) -> None:
    assert (train.world_size, engine.world_size) == (512, 64)
    family = family_for(transformers.AutoConfig.for_model("qwen3_moe", **QWEN3_235B_A22B))
    plan = build_plan(train, engine, family, bucket_bytes=2**29)
    sent, received = plan.bytes_by_sender(), plan.bytes_by_receiver()
    assert sum(sent.values()) == sum(received.values()) == plan.bytes_moved
    assert plan.bytes_moved <= 1.05 * plan.lower_bound
    assert plan.bytes_moved >= 2 * PARAMETERS * engine.replicas
    for _, shares in plan.bytes_by_replica():
        assert max(shares) <= 1.1 * min(shares)
    elements = sum(transfer.source_box.elements for transfer in plan.transfers_from(77))
    assert elements * 2 * engine.replicas == sent[77]
    elements = sum(transfer.target_box.elements for transfer in plan.transfers_to(5))
    assert elements * 2 == received[5]


def test_replicas_of_a_32b_shard_all_work_in_most_buckets() -> None:
    config = transformers.Qwen2Config(
        num_hidden_layers=64,
        hidden_size=5120,
        intermediate_size=27648,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
        tie_word_embeddings=False,
    )
    plan = build_plan(
        TrainLayout(tensor=8, pipeline=2, data=8, padded_vocab_size=152576),
        EngineLayout(tensor=4, replicas=2),
        family_for(config),
        bucket_bytes=2**29,
    )
    for bucket in (20, 50, 100):
        sizes = plan.message_sizes(bucket, 1)
        assert len(sizes) >= 12  # of 16: two tensor ranks hold what this rank needs, x 8 replicas
