"""Full tensors from shards: who sends them, and how they are put together again."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, given, settings

from megatron_dapo.resharding.transfer import _Gather
from tests.unit.resharding.layouts import Case, cases, numbered, train_parameters


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_shards_of_their_holders_are_the_whole_tensors(case: Case) -> None:
    family, tensors = case.family, numbered(case.family)
    held = cache(lambda rank: train_parameters(case, tensors, rank))
    some_parameter = {family.entries[0]: torch.empty(0)}
    gather = _Gather(
        family,
        case.train,
        some_parameter,
        SimpleNamespace(),
        dtype=torch.int64,  # type: ignore[arg-type]
    )
    found = {}
    for entry in family.entries:
        if entry.rule.exported:
            holders = case.train.holders(entry, family)
            assert len(set(holders)) == len(holders) == case.train.shards(entry.rule)
            shards = [held(rank)[entry.key] for rank in holders]
            assert {tuple(shard.shape) for shard in shards} == {gather._shape(entry)}
            found |= dict(gather._assemble(entry, shards))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
