from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.reward.overlong import soft_overlong_penalty
from tests.unit.handed import Case, handed_cases


@pytest.mark.parametrize("case", handed_cases("d", "overlong_penalty"))
def test_handed_penalty(case: Case) -> None:
    given_ = case["input"]
    penalty = soft_overlong_penalty(
        given_["response_tokens"],
        max_response_tokens=given_["max_response_tokens"],
        overlong_buffer_tokens=given_["cache_tokens"],
        penalty_factor=given_["factor"],
    )
    assert penalty == pytest.approx(case["expect"]["penalty"], abs=case["tol"])


@pytest.mark.parametrize(("tokens", "penalty"), [(16385, -1 / 4096), (20481, -1), (30000, -1)])
def test_the_ramp_starts_after_the_free_zone_and_has_a_floor(tokens: int, penalty: float) -> None:
    limits = {"max_response_tokens": 20480, "overlong_buffer_tokens": 4096}
    assert soft_overlong_penalty(tokens, **limits) == penalty
    assert soft_overlong_penalty(tokens, **limits, penalty_factor=0.5) == penalty / 2


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 200), st.data())
def test_the_penalty_is_the_paper_s_equation(tokens: int, limit: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, limit))
    if tokens <= limit - buffer:
        expected = 0.0
    elif tokens <= limit:
        expected = ((limit - buffer) - tokens) / buffer
    else:
        expected = -1.0
    penalty = soft_overlong_penalty(
        tokens, max_response_tokens=limit, overlong_buffer_tokens=buffer
    )
    assert penalty == pytest.approx(expected, abs=1e-12)


def test_a_buffer_of_zero_punishes_nothing() -> None:
    assert soft_overlong_penalty(99, max_response_tokens=10, overlong_buffer_tokens=0) == 0.0


@pytest.mark.parametrize("buffer", [-1, 101])
def test_a_buffer_outside_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="overlong_buffer_tokens"):
        soft_overlong_penalty(1, max_response_tokens=100, overlong_buffer_tokens=buffer)
