from __future__ import annotations

import pytest

from megatron_dapo.rollout.restarts import STEPS_TO_REFILL, RestartBudget


def test_waits_double_until_nothing_is_left() -> None:
    budget = RestartBudget(3)
    assert [budget.spend() for _ in range(5)] == [1.0, 2.0, 4.0, None, None]


def test_no_restart_may_be_allowed() -> None:
    assert RestartBudget(0).spend() is None


@pytest.mark.parametrize("steps", [STEPS_TO_REFILL - 1, STEPS_TO_REFILL])
def test_steps_without_a_loss_refill_it(steps: int) -> None:
    budget = RestartBudget(2)
    assert [budget.spend(), budget.spend()] == [1.0, 2.0]
    for _ in range(steps):
        budget.step_done()
    assert budget.spend() == (1.0 if steps == STEPS_TO_REFILL else None)


def test_a_loss_in_between_starts_the_counting_again() -> None:
    budget = RestartBudget(2)
    budget.spend()
    for _ in range(STEPS_TO_REFILL - 1):
        budget.step_done()
    assert budget.spend() == 2.0
    for _ in range(STEPS_TO_REFILL - 1):
        budget.step_done()
    assert budget.spend() is None
