"""The engine's side without an engine: messages of random layouts into modules that imitate it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dapo.resharding.digest import as_hex, parameter_digest
from megatron_dapo.resharding.messages import DTYPES
from megatron_dapo.resharding.plan import EngineLayout, ReshardPlan, TrainLayout, build_plan
from megatron_dapo.resharding.receive import PlannedWeights, UpdateState, Way
from megatron_dapo.resharding.transport import new_payload
from tests.unit.resharding.in_process import InProcess, outboxes_of
from tests.unit.resharding.layouts import Case, cases, numbered, vllm_parameters

ALL = 2**64


@dataclass(eq=False)
class Module:
    """Imitates one module: its kernel's layout is the checkpoint's, turned round."""

    way: Way
    targets: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    log: list[str] = field(default_factory=list)
    kernel: dict[str, Tensor] = field(default_factory=dict)
    open_tensors: dict[str, Tensor] | None = None

    def __post_init__(self) -> None:
        self.kernel = {n: torch.full(s, 7, dtype=self.dtype) for n, s in self.targets.items()}

    def open(self) -> Mapping[str, Tensor]:
        if self.way == "live":
            return self.kernel
        if self.open_tensors is None:
            self.log.append("open")
            self.open_tensors = {n: torch.full_like(t, 7) for n, t in self.kernel.items()}
        return self.open_tensors

    def close(self) -> None:
        self.log.append("close")
        if self.way != "live":
            assert self.open_tensors is not None, "closed without having been opened"
            self.kernel = {n: t.flip(0) for n, t in self.open_tensors.items()}
            self.open_tensors = None

    def checkpoint(self) -> dict[str, Tensor]:
        if self.way == "live":
            return self.kernel
        return {name: tensor.flip(0) for name, tensor in self.kernel.items()}


def modules_of(plan: ReshardPlan, rank: int, rebuilt: bool = True) -> list[Module]:
    """Norms are live, everything else is rebuilt, module by module."""
    found: dict[tuple[str, Way], dict[str, tuple[int, ...]]] = {}
    for name, shape in plan.parameters(rank).items():
        live = "norm" in name or name.endswith("bias") or not rebuilt
        way: Way = "live" if live else "rebuilt"
        found.setdefault((name.rpartition(".")[0], way), {})[name] = shape
    dtype = DTYPES[plan.engine.dtype]
    return [Module(way, targets, dtype) for (_, way), targets in found.items()]


def plan_of(case: Case) -> ReshardPlan:
    return build_plan(case.train, case.engine, case.family, bucket_bytes=case.bucket_bytes)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), data=st.data())
def test_an_update_fills_every_parameter_and_proves_it(case: Case, data: st.DataObject) -> None:
    plan, dtype = plan_of(case), DTYPES[case.engine.dtype]
    rank = data.draw(st.integers(0, case.engine.tensor - 1))
    tensors = numbered(case.family)
    outboxes = outboxes_of(plan, {name: value.double() for name, value in tensors.items()})
    modules = modules_of(plan, rank)
    weights = PlannedWeights(plan, rank, modules, InProcess(outboxes, rank))
    weights.receive(new_payload(1, 1))
    held = {name: t for module in modules for name, t in module.checkpoint().items()}
    wanted = {name: t.to(dtype) for name, t in vllm_parameters(case, tensors, rank).items()}
    assert held.keys() == wanted.keys()
    sent = {name: 0 for name in wanted}
    for outbox in outboxes:
        for name, part in outbox.partial_digests(rank).items():
            sent[name] = (sent[name] + part) % ALL
    found = weights.digests()
    for name, value in wanted.items():
        assert torch.equal(held[name], value), name
        digest = int(parameter_digest(value, word_bytes=plan.word_bytes(name)))
        assert found[name] == as_hex(digest) == as_hex(sent[name])
    report = weights.report()
    assert report["bytes_received"] == plan.bytes_by_receiver()[rank]
    assert report["live"] + report["rebuilt"] == len(wanted)  # type: ignore[operator]
    assert all(module.log in (["close"], ["open", "close"]) for module in modules)


def dense(tensor: int = 2, bucket_bytes: int = 5000) -> Case:
    config = transformers.Qwen2Config(
        vocab_size=70,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    train = TrainLayout(tensor=2, pipeline=2, data=2, padded_vocab_size=72)
    engine = EngineLayout(tensor=tensor, dtype="float32")
    return Case(config, train, engine, bucket_bytes)


@dataclass
class Ready:
    """A worker of the dense case, and what it should hold."""

    plan: ReshardPlan
    modules: list[Module]
    weights: PlannedWeights
    transport: InProcess
    wanted: dict[str, Tensor]

    def holds_all(self) -> bool:
        held = {name: t for module in self.modules for name, t in module.checkpoint().items()}
        return all(torch.equal(held[name], value) for name, value in self.wanted.items())


@pytest.fixture
def ready() -> Ready:
    case = dense()
    plan, tensors = plan_of(case), numbered(case.family)
    transport = InProcess(outboxes_of(plan, {n: t.float() for n, t in tensors.items()}), 1)
    modules = modules_of(plan, 1)
    wanted = {name: t.float() for name, t in vllm_parameters(case, tensors, 1).items()}
    weights = PlannedWeights(plan, 1, modules, transport)
    return Ready(plan, modules, weights, transport, wanted)


def test_messages_are_asked_for_in_plan_order_and_once(ready: Ready) -> None:
    ready.weights.receive(new_payload(1, 1))
    order = [(b, s) for b in range(ready.plan.num_buckets) for s in ready.plan.senders_of(b, 1)]
    assert ready.transport.asked == order
    assert len(order) > ready.plan.num_buckets > 4


def test_only_modules_of_one_bucket_are_open_at_a_time(ready: Ready) -> None:
    ready.weights.receive(new_payload(1, 1))
    largest = max(t.nbytes for m in ready.modules for t in m.kernel.values() if m.way != "live")
    most = ready.weights.report()["peak_extra_bytes"]
    assert isinstance(most, int)
    # A bucket's worth of modules, and those that the bucket before and the one after cut.
    assert most <= ready.transport.staging_bytes + 5000 + 2 * largest
    assert most < sum(t.nbytes for t in ready.wanted.values()) / 2


@pytest.mark.parametrize("fault", ["missing", "short", "long", "transport"])
@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_broken_update_is_refused_and_a_complete_one_heals_it(
    ready: Ready, fault: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [(b, s) for b in range(ready.plan.num_buckets) for s in ready.plan.senders_of(b, 1)]
    original = ready.transport.receive

    def receive(bucket: int, sender: int) -> Tensor:
        if (bucket, sender) != order[place]:
            return original(bucket, sender)
        if fault == "missing":
            ready.transport.messages.pop((bucket, sender))
        if fault == "transport":
            raise RuntimeError(f"trainer rank {sender} has gone")
        flat = original(bucket, sender)
        return flat[:-4] if fault == "short" else torch.cat([flat, flat[:4]])

    monkeypatch.setattr(ready.transport, "receive", receive)
    with pytest.raises(RuntimeError, match=r"trainer rank \d|has transfers for"):
        ready.weights.receive(new_payload(1, 1))
    assert ready.transport.messages == {}
    monkeypatch.undo()
    ready.weights.receive(new_payload(2, 1))
    assert ready.holds_all()


def test_corrupted_values_change_the_digest(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    ready.weights.receive(new_payload(1, 1))
    right = ready.weights.digests()
    original = ready.transport.receive

    def receive(bucket: int, sender: int) -> Tensor:
        flat = original(bucket, sender)
        if bucket == 3:
            flat[17] ^= 1
        return flat

    monkeypatch.setattr(ready.transport, "receive", receive)
    ready.weights.receive(new_payload(2, 1))
    wrong = ready.weights.digests()
    senders = len(ready.plan.senders_of(3, 1))
    assert sum(wrong[name] != right[name] for name in right) in range(1, senders + 1)


def test_a_live_parameter_that_changes_later_changes_its_digest(ready: Ready) -> None:
    ready.weights.receive(new_payload(1, 1))
    before = ready.weights.digests()
    norm = next(m for m in ready.modules if "model.norm.weight" in m.targets)
    norm.kernel["model.norm.weight"][3] += 1
    after = ready.weights.digests()
    assert [name for name in before if before[name] != after[name]] == ["model.norm.weight"]


def test_a_wider_live_parameter_keeps_the_digest_of_what_was_sent(ready: Ready) -> None:
    ready.weights.receive(new_payload(1, 1))
    before = ready.weights.digests()
    for module in ready.modules:
        if module.way == "live":
            module.kernel = {name: tensor.double() for name, tensor in module.kernel.items()}
    assert ready.weights.digests() == before


def test_padding_rows_are_set_to_zero(ready: Ready) -> None:
    """70 words in 128 rows over two ranks: the second has six real rows."""
    ready.weights.receive(new_payload(1, 1))
    held = next(m for m in ready.modules if "lm_head.weight" in m.targets).checkpoint()
    head = held["lm_head.weight"]
    assert head.shape[0] == 64 and head[:6].ne(0).all() and head[6:].eq(0).all()


@pytest.mark.parametrize("what", ["missing", "surplus"])
def test_parts_that_are_not_the_plans_are_refused(ready: Ready, what: str) -> None:
    modules = ready.modules[1:]
    if what == "surplus":
        modules = [*ready.modules, Module("live", {"model.extra.weight": (2,)}, torch.float32)]
    with pytest.raises(ValueError, match="plan and engine differ in 1 parameters"):
        PlannedWeights(ready.plan, 1, modules, ready.transport)


def test_state_goes_from_start_to_finish() -> None:
    state = UpdateState()
    state.start()
    state.begin(4)
    assert state.version is None and state.interrupted
    state.received()
    state.finish()
    assert state.version == 4 and not state.interrupted


def test_what_failed_cannot_be_finished_even_after_another_start() -> None:
    state = UpdateState()
    state.start()
    state.begin(4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="weights 4 failed or is incomplete"):
            state.finish()
        state.start()
    assert state.version is None
    state.begin(5)
    state.received()
    state.finish()
    assert state.version == 5


def test_steps_out_of_order_are_refused() -> None:
    state = UpdateState()
    with pytest.raises(RuntimeError, match="without any update_weights"):
        state.finish()
    with pytest.raises(RuntimeError, match="before start_weight_update"):
        state.begin(1)
    state.start()
    with pytest.raises(RuntimeError, match="without any update_weights"):
        state.finish()
