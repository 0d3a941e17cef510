from __future__ import annotations

import pytest
import torch

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.denominators import Ledger
from megatron_dapo.types import MicroBatch
from tests.unit.loss.packs import pack

# Two groups; row 3 is fully masked, row 4 is alone in group 2 and masked too.
RESPONSES = [
    (0, 0, [1, 1, 1]),
    (1, 0, [1]),
    (2, 1, [0, 1, 1, 0]),
    (3, 1, [0, 0]),
    (4, 2, [0]),
]
CUTS = [
    [[0, 1, 2, 3, 4]],
    [[0], [1], [2], [3], [4]],
    [[4, 2], [], [0, 3, 1]],
]


def micro_batches(cut: list[list[int]]) -> list[MicroBatch]:
    return [pack([RESPONSES[i] for i in part]) for part in cut]


def ledger_of(batches: list[MicroBatch], aggregation: str) -> Ledger:
    tokens = 7 if aggregation == "constant" else None
    config = LossConfig(aggregation=aggregation, constant_tokens=tokens)
    return Ledger.from_micro_batches(batches, config)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("aggregation", "denominator", "weight_of_row"),
    [
        ("token_mean", 6, [1, 1, 1]),
        ("sequence_mean", 3, [1 / 3, 1, 1 / 2]),
        ("group_token_mean", 2, [1 / 4, 1 / 4, 1 / 2]),
        ("constant", 5, [1 / 7, 1 / 7, 1 / 7]),
    ],
)
def test_the_cut_into_micro_batches_changes_nothing(
    cut: list[list[int]], aggregation: str, denominator: int, weight_of_row: list[float]
) -> None:
    batches = micro_batches(cut)
    ledger = ledger_of(batches, aggregation)
    parts = [ledger.denominator(batch) for batch in batches]
    assert all(part.dtype == torch.int64 and part.dim() == 0 for part in parts)
    assert sum(int(part) for part in parts) == denominator
    assert ledger.counted_tokens == 6
    assert not ledger.empty
    for batch in batches:
        weights = ledger.token_weights(batch)
        assert weights.dtype == torch.float64
        assert (weights[~batch.loss_mask] == 0).all()
        for i, row in enumerate(batch.rows.tolist()):
            counted = batch.loss_mask & (batch.sequence_index == i)
            for weight in weights[counted].tolist():
                assert weight == weight_of_row[row]


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean", "group_token_mean", "constant"]
)
@pytest.mark.parametrize(
    "batches", [[pack([])], [pack([(0, 0, [0, 0])]), pack([])], [pack([], padding=0)]]
)
def test_an_update_that_trains_nothing_is_empty_and_weighs_nothing(
    aggregation: str, batches: list[MicroBatch]
) -> None:
    ledger = ledger_of(batches, aggregation)
    assert ledger.empty
    for batch in batches:
        assert (ledger.token_weights(batch) == 0).all()
        responses = batch.num_sequences if aggregation == "constant" else 0
        assert int(ledger.denominator(batch)) == responses


def test_setting_old_logprobs_on_a_micro_batch_keeps_its_place_in_the_ledger() -> None:
    batches = micro_batches(CUTS[2])
    ledger = ledger_of(batches, "sequence_mean")
    changed = batches[0].replace(old_logprobs=torch.zeros(batches[0].num_tokens))
    assert torch.equal(ledger.token_weights(changed), ledger.token_weights(batches[0]))


def test_an_update_without_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="micro_batches is empty"):
        ledger_of([], "token_mean")


def test_a_constant_divisor_must_be_given() -> None:
    with pytest.raises(ValueError, match="constant_tokens"):
        Ledger.from_micro_batches([pack([])], LossConfig(aggregation="constant"))


def test_responses_without_tokens_have_no_group_to_count() -> None:
    empty = pack([(0, 0, [])], padding=0)
    assert empty.num_sequences == 1
    ledger = ledger_of([empty], "group_token_mean")
    assert ledger.empty
    assert int(ledger.denominator(empty)) == 0
