from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_dapo.reward.math_answer import verify_answer
from tests.unit.handed import Case, handed_cases


@pytest.mark.parametrize("case", handed_cases("e", "verify_answer"))
def test_handed_answer(case: Case) -> None:
    given = case["input"]
    with ThreadPoolExecutor(1) as pool:
        check = pool.submit(
            verify_answer, given["response"], given["truth"], style=given["style"]
        ).result(timeout=given["budget_s"])
    assert check.correct is case["expect"]["correct"], check
