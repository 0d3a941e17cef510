from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.data.exact_sum import ExactSum, Unsupported, square_free_part

rationals = st.fractions(-50, 50, max_denominator=12).map(ExactSum.rational)
surds = st.integers(0, 60).map(lambda number: ExactSum.rational(number).sqrt())
values = st.lists(st.tuples(rationals, surds), max_size=3).map(
    lambda pairs: sum((a * b for a, b in pairs), start=ExactSum.rational(0))
)


def as_float(value: ExactSum) -> float:
    assert not value.symbols
    return sum(float(factor) * math.sqrt(radicand) for (radicand, _), factor in value.terms)


@settings(deadline=None)
@given(values, values)
def test_sums_and_products_are_those_of_the_numbers(a: ExactSum, b: ExactSum) -> None:
    assert as_float(a + b) == pytest.approx(as_float(a) + as_float(b), abs=1e-6)
    assert as_float(a * b) == pytest.approx(as_float(a) * as_float(b), rel=1e-9, abs=1e-6)
    assert a - b + b == a
    assert a * b == b * a


@settings(deadline=None)
@given(values, rationals, rationals, st.integers(2, 60))
def test_division_undoes_multiplication(
    a: ExactSum, b: ExactSum, c: ExactSum, radicand: int
) -> None:
    divisor = b + c * ExactSum.rational(radicand).sqrt()
    if divisor.terms:
        assert a * divisor / divisor == a


@given(st.integers(0, 10_000))
def test_a_radicand_has_no_square_factor(number: int) -> None:
    outer, radicand = square_free_part(number)
    assert outer * outer * radicand == number
    assert all(radicand % (prime * prime) for prime in range(2, math.isqrt(radicand) + 1))


def test_equal_values_are_equal_objects() -> None:
    half, root = ExactSum.rational(Fraction(1, 2)), ExactSum.rational(8).sqrt()
    assert half * root == ExactSum.rational(2).sqrt()
    assert (ExactSum.rational(3) - ExactSum.rational(3)).terms == ()
    assert ExactSum.symbol("x") / ExactSum.symbol("x") == ExactSum.rational(1)
    assert ExactSum.rational(4).as_integer == 4
    assert root.as_rational is None


def test_what_is_not_exact_is_refused() -> None:
    x, two = ExactSum.symbol("x"), ExactSum.rational(2)
    for attempt in (
        lambda: two / ExactSum.rational(0),
        lambda: two / (x + two),
        lambda: x.sqrt(),
        lambda: ExactSum.rational(-1).sqrt(),
        lambda: two**100_000,
        lambda: (x + two) ** 17,
        lambda: ExactSum.rational(10**13 + 37).sqrt(),
    ):
        with pytest.raises(Unsupported):
            attempt()
