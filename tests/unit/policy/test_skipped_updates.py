"""What ends a run, without a model."""

from __future__ import annotations

import math

import pytest

from megatron_dapo.observability.metrics import MetricBag
from megatron_dapo.policy.trained_model import SkippedUpdates, UpdateResult
from tests.unit.handed import Case, handed_cases


def outcome(grad_norm: float) -> UpdateResult:
    return UpdateResult(MetricBag(), grad_norm, skipped=not math.isfinite(grad_norm))


@pytest.mark.parametrize("case", handed_cases("a", "bad_steps"))
def test_a_run_goes_on_after_a_bad_gradient(case: Case) -> None:
    skipped = SkippedUpdates(case["input"]["stop_after"])
    results = [outcome(float(norm)) for norm in case["input"]["grad_norms"]]
    for result in results:
        skipped.note("policy", result)
    assert [i for i, result in enumerate(results) if not result.skipped] == case["expect"][
        "applied"
    ]
    assert [i for i, result in enumerate(results) if result.skipped] == case["expect"]["skipped"]


def test_bad_gradients_in_a_row_end_the_run() -> None:
    skipped = SkippedUpdates(3)
    for norm in (math.nan, math.inf, 1.0, math.nan, math.nan):
        skipped.note("policy", outcome(norm))
    skipped.note("critic", outcome(math.nan))
    with pytest.raises(
        RuntimeError, match=r"3 updates of the policy in a row .*stop_after_skipped=3"
    ):
        skipped.note("policy", outcome(math.nan))


def test_updates_without_a_token_to_train_do_not_count() -> None:
    skipped = SkippedUpdates(1)
    skipped.note("policy", UpdateResult(MetricBag(), 0.0, skipped=True))
    assert skipped.in_a_row["policy"] == 0


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("disk")])
def test_a_dump_that_cannot_be_written_does_not_hide_why_the_run_ends(error: Exception) -> None:
    def full() -> object:
        raise error

    skipped = SkippedUpdates(1)
    with pytest.raises(RuntimeError, match=r"gradient norm of nan .*could not be written"):
        skipped.note("policy", outcome(math.nan), full)
