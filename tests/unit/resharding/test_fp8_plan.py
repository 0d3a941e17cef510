"""FP8 engines on random layouts: what arrives is each matrix quantised whole, byte for byte."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dapo.resharding import lines
from megatron_dapo.resharding.block_grid import BLOCK, SCALE_SUFFIX
from megatron_dapo.resharding.boxes import Box
from megatron_dapo.resharding.digest import as_hex, as_matrix, parameter_digest
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.messages import dtype_of
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import ReshardPlan, TrainLayout, build_plan
from megatron_dapo.resharding.quantize import E4M3
from megatron_dapo.resharding.receive import PlannedWeights, Way
from megatron_dapo.resharding.transport import new_payload
from tests.unit.resharding.fp8_layouts import bits, expected, fp8_cases, plan_of, telling
from tests.unit.resharding.in_process import InProcess, outboxes_of
from tests.unit.resharding.layouts import Case, train_placements

ALL = 2**64
LAYOUTS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def small_messages() -> Iterator[None]:
    """Small models are cut into as many stripes as large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "MESSAGE_BYTES", 16)
        patch.setattr(lines, "ROWS_PER_STRIPE", 1)
        yield


@dataclass(eq=False)
class Rebuilt:
    """Some parameters, that are handed over when they are complete."""

    targets: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    way: Way = "rebuilt"
    held: dict[str, Tensor] = field(default_factory=dict)

    def open(self) -> Mapping[str, Tensor]:
        self.held = {
            name: torch.full(shape, 9.0).to(self.dtypes[name])
            for name, shape in self.targets.items()
        }
        return self.held

    def close(self) -> None:
        """Nothing to bring into another layout."""


def part_of(plan: ReshardPlan, rank: int) -> Rebuilt:
    targets = plan.parameters(rank)
    return Rebuilt(targets, {n: dtype_of(plan.content(n), torch.bfloat16) for n in targets})


@LAYOUTS
@given(case=fp8_cases(), data=st.data())
def test_an_update_brings_what_quantising_whole_matrices_gives(
    case: Case, data: st.DataObject
) -> None:
    plan, tensors = plan_of(case), telling(case.family)
    rank = data.draw(st.integers(0, case.engine.tensor - 1))
    outboxes, part = outboxes_of(plan, tensors), part_of(plan, rank)
    weights = PlannedWeights(plan, rank, [part], InProcess(outboxes, rank))
    weights.receive(new_payload(1, 1))
    wanted = expected(case, tensors, rank)
    assert part.held.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(bits(part.held[name]), bits(value)), name
    sent: Counter[str] = Counter()
    for outbox in outboxes:
        sent.update(outbox.partial_digests(rank))
    found = weights.digests()
    for name, held in part.held.items():
        digest = int(parameter_digest(held, word_bytes=plan.word_bytes(name)))
        assert found[name] == as_hex(digest) == as_hex(sent[name]), name


@LAYOUTS
@given(case=fp8_cases())
def test_the_bytes_on_the_wire_are_those_that_the_engines_own(case: Case) -> None:
    plan = plan_of(case)
    received: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for rank in range(case.engine.tensor):
        sizes: dict[tuple[int, int], int] = defaultdict(int)
        for transfer in plan.transfers_to(rank):
            size = transfer.target_box.elements * case.engine.bytes_of(transfer.content)
            assert transfer.source_box.elements == transfer.target_box.elements
            received[rank] += size
            sent[transfer.sender] += size * case.engine.replicas
            sizes[transfer.bucket, transfer.sender] += size
        for (bucket, sender), size in sizes.items():
            length = plan.message_bytes(bucket, sender, rank)
            assert size <= length < size + 4 and length % 4 == 0
            assert plan.message_sizes(bucket, rank)[sender] == length
    ranks = case.engine.world_size
    assert plan.bytes_by_receiver() == {r: received[r % case.engine.tensor] for r in range(ranks)}
    assert +Counter(plan.bytes_by_sender()) == sent
    owned = 0
    for rank in range(case.engine.tensor):
        for value in expected(case, telling(case.family), rank).values():
            owned += value.nbytes
        for name, box in plan.padding(rank):
            assert plan.content(name) == "plain"
            owned -= box.elements * case.engine.item_bytes
    assert plan.bytes_moved == plan.lower_bound == owned * case.engine.replicas


@LAYOUTS
@given(case=fp8_cases())
def test_both_sides_list_the_same_messages_and_a_rank_sends_what_it_holds(case: Case) -> None:
    plan = plan_of(case)
    shapes = cache(plan.sources)
    of_receivers = defaultdict(list)
    for rank in range(case.engine.tensor):
        for transfer in plan.transfers_to(rank):
            of_receivers[transfer.bucket, transfer.sender, rank].append(transfer)
    of_senders = defaultdict(list)
    for sender in range(case.train.world_size):
        for transfer in plan.transfers_from(sender):
            of_senders[transfer.bucket, sender, transfer.receiver].append(transfer)
            rows, cols = (*shapes(sender)[transfer.source], 1)[:2]
            box = transfer.source_box
            if transfer.content == "scales":
                rows, cols = plan.block_sources(sender)[transfer.source].blocks
            assert box.row + box.rows <= rows and box.col + box.cols <= cols
    assert of_senders == of_receivers
    for (bucket, sender, rank), transfers in list(of_senders.items())[:20]:
        message = plan.message(bucket, sender, rank)
        assert Counter(message) == Counter(transfers)
        order = [transfer.content for transfer in message]
        assert order == sorted(order, key=("scales", "plain", "values").index)


@LAYOUTS
@given(case=fp8_cases())
def test_replicas_of_a_shard_send_equally_much_and_buckets_are_bounded(case: Case) -> None:
    plan = plan_of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "ROWS_PER_STRIPE", 25)
        for shard, sent in plan.bytes_by_replica():
            assert len(sent) == case.train.replicas(shard)
            rows = 2 * plan.widest_row_bytes(shard)
            assert max(sent) - min(sent) <= max(0.1 * max(sent), rows)
    widest = max(
        BLOCK * shape[-1] + 4 * shape[-1] // BLOCK for shape in case.family.hf_tensors.values()
    )
    received: Counter[int] = Counter()
    for transfer in plan.transfers_to(0):
        size = transfer.target_box.elements * case.engine.bytes_of(transfer.content)
        received[transfer.bucket] += size
    assert max(received) < plan.num_buckets
    assert max(received.values()) <= max(case.bucket_bytes, widest)


@LAYOUTS
@given(case=fp8_cases())
def test_no_box_cuts_a_word_and_whole_blocks_stay_together(case: Case) -> None:
    plan = plan_of(case)
    for transfer in plan.transfers_to(0):
        word, box = plan.word_bytes(transfer.target), transfer.target_box
        item = case.engine.bytes_of(transfer.content)
        assert word in (1, 2, 4, 8) and box.col * item % word == 0 == box.cols * item % word
        apart = case.family.dimensions["head"] % BLOCK and ".qkv_proj." in transfer.target
        if transfer.content == "values" and not plan.shared_blocks and not apart:
            cuts = (box.row, box.rows, box.col, box.cols)
            assert all(cut % BLOCK == 0 for cut in cuts), transfer


@LAYOUTS
@given(case=fp8_cases())
def test_blocks_on_several_ranks_are_counted(case: Case) -> None:
    plan, train = plan_of(case), case.train
    holders: dict[tuple[str, int, int], set[object]] = defaultdict(set)
    for rank in range(train.world_size):
        place = train.coordinates(rank)
        for held in train_placements(case.family, train, rank):
            if plan.content(engine_name(held.tensor)) != "values":
                continue
            part = held.part
            shard = place.expert_tensor if ".experts." in held.tensor else place.tensor
            for down in range(part.row // BLOCK, (part.row + part.rows - 1) // BLOCK + 1):
                for across in range(part.col // BLOCK, (part.col + part.cols - 1) // BLOCK + 1):
                    holders[held.tensor, down, across].add(shard)
    assert plan.blocks == len(holders)
    assert plan.shared_blocks == sum(len(shards) > 1 for shards in holders.values())


def engine_name(tensor: str) -> str:
    """The engine parameter of a Hugging Face tensor."""
    stem, _, kind = tensor.rpartition(".")
    module, _, last = stem.rpartition(".")
    if last in ("q_proj", "k_proj", "v_proj"):
        return f"{module}.qkv_proj.{kind}"
    if ".experts." in tensor:
        fused = "w2_weight" if last == "down_proj" else "w13_weight"
        return f"{module.rpartition('.')[0]}.routed_experts.{fused}"
    return f"{module}.gate_up_proj.{kind}" if last in ("gate_proj", "up_proj") else tensor


def qwen3(**sizes: int) -> transformers.PretrainedConfig:
    standard = dict(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        hidden_size=256,
        intermediate_size=768,
        vocab_size=64,
    )
    return transformers.AutoConfig.for_model("qwen3", **(standard | sizes))


def dense_case(tensor: int = 2, engine: int = 2, **sizes: int) -> Case:
    train = TrainLayout(tensor=tensor, data=2, padded_vocab_size=64)
    layout = EngineLayout(tensor=engine, quantization="fp8")
    return Case(qwen3(**sizes), train, layout, 60_000)


def test_a_shard_of_whole_blocks_sends_them_with_their_scales() -> None:
    plan = plan_of(replace(dense_case(), bucket_bytes=10**7))
    assert plan.shared_blocks == 0
    name = "model.layers.1.mlp.up_proj.weight"
    found = [t for t in plan.transfers_to(1) if t.tensor == name]
    values = [t for t in found if t.content == "values"]
    scales = [t for t in found if t.content == "scales"]
    target = "model.layers.1.mlp.gate_up_proj.weight"
    assert [t.target for t in found] == [target, target + SCALE_SUFFIX] * (len(found) // 2)
    # Rows 384 to 768 of up: the trainer's parameter has them below as many of gate.
    assert sum(t.source_box.rows for t in values) == 384
    assert values[0].source_box.row == 384 == values[0].target_box.row
    assert all(t.sender % 2 == 1 for t in found)
    # Of the stack of gate and up, blocks 6 + 3 on; of the engine's part, blocks 3 on.
    first = scales[0]
    assert first.source_box == Box(9, values[0].source_box.rows // BLOCK, 0, 2)
    assert first.target_box == replace(first.source_box, row=3)


def test_one_wrong_bit_changes_the_digest_of_one_parameter_alone() -> None:
    case = dense_case()
    plan, outboxes = plan_of(case), outboxes_of(plan_of(case), telling(case.family))

    def digests(damage: tuple[int, int] | None) -> dict[str, str]:
        transport = InProcess(outboxes, 0)
        receive = transport.receive

        def damaged(bucket: int, sender: int) -> Tensor:
            flat = receive(bucket, sender)
            if (bucket, sender) == damage:
                flat[0] ^= 1
            return flat

        transport.receive = damaged  # type: ignore[method-assign]
        weights = PlannedWeights(plan, 0, [part_of(plan, 0)], transport)
        weights.receive(new_payload(1, 1))
        return weights.digests()

    sound, seen = digests(None), set()
    for bucket in range(plan.num_buckets):
        for sender in plan.senders_of(bucket, 0):
            first = plan.message(bucket, sender, 0)[0].target
            found = digests((bucket, sender))
            assert {name for name in sound if found[name] != sound[name]} == {first}
            seen.add(plan.content(first))
    assert seen == {"scales", "plain"}


def test_a_diverged_policy_is_not_sent() -> None:
    case = dense_case()
    tensors = telling(case.family)
    tensors["model.layers.1.self_attn.k_proj.weight"][200, 3] = float("nan")
    plan = plan_of(case)
    outboxes = outboxes_of(plan, tensors)
    holders = [outbox for outbox in outboxes if outbox.sender % 2 == 1]
    message = next(message for message in holders[0] if message.transfers[0].content == "scales")
    with pytest.raises(RuntimeError, match=r"layers\.1\.self_attn\.q_proj.*infinity or NaN"):
        holders[0].pack(message, torch.empty(message.num_bytes, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("engine", "sizes", "message"),
    [
        (1, {"hidden_size": 192}, r"q_proj\.weight: the 192 columns of a rank .*engine_tensor=1"),
        (4, {}, r"gate_proj\.weight: the 192 rows of a rank of rollout\.engine_tensor=4"),
        (2, {"head_dim": 64}, r"k_proj\.weight: the 64 rows of a rank"),
    ],
)
def test_engine_ranks_that_blocks_do_not_fill_are_refused(
    engine: int, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(dense_case(engine=engine, **sizes))


QWEN3_30B_A3B = dict(
    num_hidden_layers=48,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize(
    ("expert_tensor", "shared"),
    [(1, 0), (4, 48 * 128 * 3 * 2 * 16)],  # 768 / 4 = 192: of 6 rows of blocks, 2 are cut
)
def test_a_30b_update_is_the_engines_bytes_even_where_trainers_cut_blocks(
    expert_tensor: int, shared: int
) -> None:
    family = family_for(transformers.AutoConfig.for_model("qwen3_moe", **QWEN3_30B_A3B))
    train = TrainLayout(
        tensor=4, data=8, expert=8, expert_tensor=expert_tensor, padded_vocab_size=152064
    )
    engine = EngineLayout(tensor=2, replicas=2, quantization="fp8")
    plan = build_plan(train, engine, family, bucket_bytes=2**29)
    assert plan.shared_blocks == shared
    assert plan.bytes_moved == plan.lower_bound
    unquantised = build_plan(train, replace(engine, quantization=None), family, bucket_bytes=2**29)
    assert 0.5 < plan.bytes_moved / unquantised.bytes_moved < 0.53
    for _, shares in plan.bytes_by_replica():
        assert max(shares) <= 1.1 * min(shares)


def test_values_are_e4m3_and_scales_fp32() -> None:
    case = dense_case()
    part = part_of(plan_of(case), 0)
    matrix = "model.layers.0.self_attn.o_proj.weight"
    assert part.dtypes[matrix] == E4M3
    assert part.dtypes[matrix + SCALE_SUFFIX] == torch.float32
    assert as_matrix(torch.empty(part.targets[matrix + SCALE_SUFFIX])).shape == (2, 2)
    assert part.dtypes["model.embed_tokens.weight"] == torch.bfloat16
