"""Exact arithmetic for answers: sums of rationals times square roots times powers of symbols."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

Monomial = tuple[int, tuple[tuple[str, int], ...]]
"""(square-free radicand, powers of symbols by name, none of them 0)."""
ONE: Monomial = (1, ())
MOST_TERMS = 64
MOST_BITS = 2048
LARGEST_RADICAND = 10**10
"""Square factors are found by trial division."""


class Unsupported(Exception):
    """A value outside of what is computed exactly here, with the reason."""


@dataclass(frozen=True, slots=True)
class ExactSum:
    """Terms in a fixed order without zeros, so that equal values are equal objects."""

    terms: tuple[tuple[Monomial, Fraction], ...]

    @classmethod
    def rational(cls, value: Fraction | int) -> ExactSum:
        """A number."""
        return _sum([(ONE, Fraction(value))])

    @classmethod
    def symbol(cls, name: str) -> ExactSum:
        """A letter or pi, of which nothing is known."""
        return _sum([((1, ((name, 1),)), Fraction(1))])

    @property
    def as_rational(self) -> Fraction | None:
        """The value, if it is a rational number."""
        if not self.terms:
            return Fraction(0)
        return self.terms[0][1] if len(self.terms) == 1 and self.terms[0][0] == ONE else None

    @property
    def as_integer(self) -> int | None:
        """The value, if it is an integer."""
        value = self.as_rational
        return value.numerator if value is not None and value.denominator == 1 else None

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the symbols in it."""
        return frozenset(name for (_, powers), _ in self.terms for name, _ in powers)

    def __add__(self, other: ExactSum) -> ExactSum:
        return _sum([*self.terms, *other.terms])

    def __neg__(self) -> ExactSum:
        return ExactSum(tuple((monomial, -factor) for monomial, factor in self.terms))

    def __sub__(self, other: ExactSum) -> ExactSum:
        return self + -other

    def __mul__(self, other: ExactSum) -> ExactSum:
        if len(self.terms) * len(other.terms) > MOST_TERMS**2:
            raise Unsupported("too many terms")
        return _sum(_product(a, b) for a in self.terms for b in other.terms)

    def __truediv__(self, other: ExactSum) -> ExactSum:
        """Raises Unsupported: by zero, or by a sum that is not cleared by its conjugate."""
        if not other.terms:
            raise Unsupported("division by zero")
        if len(other.terms) == 1:
            ((radicand, powers), factor) = other.terms[0]
            inverse = (radicand, tuple((name, -power) for name, power in powers))
            return self * _sum([(inverse, 1 / (factor * radicand))])
        if len(other.terms) == 2 and not other.symbols:
            first, second = (_sum([term]) for term in other.terms)
            conjugate = first - second
            return self * conjugate / (other * conjugate)
        raise Unsupported("division by a sum of several terms")

    def __pow__(self, exponent: int) -> ExactSum:
        if abs(exponent) > MOST_BITS or (len(self.terms) > 1 and abs(exponent) > 16):
            raise Unsupported("a power that is too large")
        for _, factor in self.terms:
            if max(factor.numerator.bit_length(), factor.denominator.bit_length()) * abs(
                exponent
            ) > max(MOST_BITS, abs(exponent)):
                raise Unsupported("a power that is too large")
        if exponent < 0:
            return ExactSum.rational(1) / self**-exponent
        result = ExactSum.rational(1)
        for _ in range(exponent):
            result = result * self
        return result

    def sqrt(self) -> ExactSum:
        """Raises Unsupported: of anything but a rational number that is not negative."""
        value = self.as_rational
        if value is None:
            raise Unsupported("the square root of something that is no rational number")
        if value < 0:
            raise Unsupported("the square root of a negative number")
        outer, radicand = square_free_part(value.numerator * value.denominator)
        return _sum([((radicand, ()), Fraction(outer, value.denominator))])


def square_free_part(value: int) -> tuple[int, int]:
    """(a, b) with value = a * a * b and b square-free; (0, 1) for 0.

    Raises:
        Unsupported: `value` is above `LARGEST_RADICAND` and no square.
    """
    if value == 0:
        return 0, 1
    root = math.isqrt(value)
    if root * root == value:
        return root, 1
    if value > LARGEST_RADICAND:
        raise Unsupported("a square root that is too large")
    outer, radicand, rest, prime = 1, 1, value, 2
    while prime * prime <= rest:
        count = 0
        while rest % prime == 0:
            rest //= prime
            count += 1
        outer *= prime ** (count // 2)
        radicand *= prime ** (count % 2)
        prime += 1
    return outer, radicand * rest


def _product(
    one: tuple[Monomial, Fraction], other: tuple[Monomial, Fraction]
) -> tuple[Monomial, Fraction]:
    ((a, a_powers), a_factor), ((b, b_powers), b_factor) = one, other
    shared = math.gcd(a, b)
    powers = dict(a_powers)
    for name, power in b_powers:
        powers[name] = powers.get(name, 0) + power
    kept = tuple(sorted((name, power) for name, power in powers.items() if power))
    return (a // shared * (b // shared), kept), a_factor * b_factor * shared


def _sum(terms: Iterable[tuple[Monomial, Fraction]]) -> ExactSum:
    total: dict[Monomial, Fraction] = {}
    for monomial, factor in terms:
        total[monomial] = total.get(monomial, Fraction(0)) + factor
    kept = tuple(sorted((monomial, factor) for monomial, factor in total.items() if factor))
    if len(kept) > MOST_TERMS:
        raise Unsupported("too many terms")
    for _, factor in kept:
        if max(factor.numerator.bit_length(), factor.denominator.bit_length()) > 2 * MOST_BITS:
            raise Unsupported("a number that is too large")
    return ExactSum(kept)
