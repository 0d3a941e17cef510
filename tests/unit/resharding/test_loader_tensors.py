"""Tensors that travel whole, for vLLM's own loader: what a plan sends of them is proven too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
import transformers
from torch import Tensor

from megatron_dapo.resharding.digest import as_hex, parameter_digest
from megatron_dapo.resharding.plan import EngineLayout, ReshardPlan, TrainLayout, build_plan
from megatron_dapo.resharding.receive import PlannedWeights
from megatron_dapo.resharding.transport import new_payload
from tests.unit.resharding.in_process import InProcess, outboxes_of
from tests.unit.resharding.layouts import Case, numbered

ALL = 2**64


@dataclass(eq=False)
class Taken:
    """A part for tensors of one kind that keeps what it was given, and lets go as a loader does."""

    targets: Mapping[str, tuple[int, ...]]
    way: Literal["live", "loader"]
    opened: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)

    def open(self) -> Mapping[str, Tensor]:
        if self.way == "live" and self.held:
            return self.held
        self.opened = {
            name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in self.targets.items()
        }
        return self.opened

    def close(self) -> None:
        self.held = {name: tensor.clone() for name, tensor in self.opened.items()}
        for tensor in self.opened.values():
            tensor.zero_()  # a loader frees them


def fp8_plan(expert: int) -> tuple[Case, ReshardPlan]:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    train = TrainLayout(
        tensor=2, data=2, expert=expert, expert_tensor=2 if expert == 1 else 1, padded_vocab_size=64
    )
    case = Case(config, train, EngineLayout(tensor=2, quantization="fp8"), 3000)
    return case, build_plan(train, case.engine, case.family, bucket_bytes=case.bucket_bytes)


def parts_of(plan: ReshardPlan, rank: int) -> list[Taken]:
    by_module: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in plan.loader_tensors:
        module = name.partition(".experts.")[0].rpartition(".")[0]
        by_module.setdefault(module, {})[name] = plan.family.hf_tensors[name]
    loaded = [Taken(targets, "loader") for targets in by_module.values()]
    return [Taken(plan.parameters(rank), "live"), *loaded]


@pytest.mark.parametrize("expert", [1, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_loader_tensor_is_digested_as_it_arrives(expert: int, rank: int) -> None:
    case, plan = fp8_plan(expert)
    tensors = {name: value.bfloat16() for name, value in numbered(case.family).items()}
    outboxes, parts = outboxes_of(plan, tensors), parts_of(plan, rank)
    weights = PlannedWeights(plan, rank, parts, InProcess(outboxes, rank))
    weights.receive(new_payload(1, 1))
    sent: dict[str, int] = {}
    for outbox in outboxes:
        for name, part in outbox.partial_digests(rank).items():
            sent[name] = (sent.get(name, 0) + part) % ALL
    assert weights.digests() == {name: as_hex(sent[name]) for name in plan.targets(rank)}
    loaded = {name: t for part in parts[1:] for name, t in part.held.items()}
    assert set(plan.targets(rank)) == plan.parameters(rank).keys() | loaded.keys()
    assert len(loaded) == 2 * (4 + 3 * 4)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, tensors[name]), name
        digest = int(parameter_digest(tensor, word_bytes=plan.word_bytes(name)))
        assert weights.digests()[name] == as_hex(digest)


class Damages(InProcess):
    """Changes one byte of one message on its way."""

    def __init__(self, outboxes, receiver, bucket: int, sender: int) -> None:  # type: ignore[no-untyped-def]
        super().__init__(outboxes, receiver)
        self.place = (bucket, sender)

    def receive(self, bucket: int, sender: int) -> Tensor:
        flat = super().receive(bucket, sender)
        if (bucket, sender) == self.place:
            flat = flat.clone()
            flat[-1] ^= 1
        return flat


def test_one_wrong_bit_of_any_loader_tensor_changes_its_digest_alone() -> None:
    case, plan = fp8_plan(4)
    tensors = {name: value.bfloat16() for name, value in numbered(case.family).items()}
    outboxes = outboxes_of(plan, tensors)
    sound = PlannedWeights(plan, 0, parts_of(plan, 0), InProcess(outboxes, 0))
    sound.receive(new_payload(1, 1))
    seen = set()
    for bucket in range(plan.num_buckets):
        for sender in plan.senders_of(bucket, 0):
            last = plan.message(bucket, sender, 0)[-1].target
            damaged = Damages(outboxes, 0, bucket, sender)
            weights = PlannedWeights(plan, 0, parts_of(plan, 0), damaged)
            weights.receive(new_payload(1, 1))
            found, wanted = weights.digests(), sound.digests()
            assert {name for name in wanted if found[name] != wanted[name]} == {last}
            seen.add(last)
    assert len(seen & set(plan.loader_tensors)) > 10
