"""The form a/b, k-m*sqrt(n), ... of an exact answer, whose coefficients add up to an integer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megatron_dapo.data.answer_parser import AnswerError
from megatron_dapo.data.exact_sum import ExactSum, Monomial

Condition = Literal["coprime", "square_free"]
CONSTANTS = frozenset(["\\pi", "e"])
PREFERRED_LETTERS = "mnkpqrstuvwbcdhj"
"""In this order; "a" is also a word, e and i are numbers, l and o look like digits."""
MOST_LETTERS = 5
_MATH = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_WORDS_IN_MATH = re.compile(r"\\(?:text|mathrm|operatorname|mbox) ?\{[^{}]*\}|\\[a-zA-Z]+")
_LONE_LETTER = re.compile(r"(?<![A-Za-z\\])([A-Za-z]{1,2})(?![A-Za-z])")
_SHORT_WORDS = frozenset(
    [
        *("a", "i", "an", "as", "at", "be", "by", "do", "go", "he", "if", "in", "is", "it"),
        *("me", "my", "no", "of", "on", "or", "so", "to", "up", "us", "we"),
    ]
)


@dataclass(frozen=True, slots=True)
class IntegerForm:
    """How the answer is written with letters, and what is asked of them.

    The letters are positive integers; signs stand in the template. Under the conditions there is
    one way to choose them, because square roots of different square-free numbers and powers of pi
    are independent over the rationals.
    """

    template: str
    """LaTeX, such as "k-m\\sqrt{n}"."""
    coefficients: tuple[tuple[str, int], ...]
    """Letters in the template's order, with their values."""
    conditions: tuple[Condition, ...]
    integer: int
    """The sum of the coefficients: the new answer."""

    @property
    def letters(self) -> tuple[str, ...]:
        """In the template's order."""
        return tuple(letter for letter, _ in self.coefficients)

    @property
    def question(self) -> str:
        """What the rewritten problem asks for."""
        return "+".join(self.letters)


def letters_of(problem: str) -> frozenset[str]:
    """Letters that stand for something in a problem: all inside mathematics, lone ones outside."""
    found: set[str] = set()
    for segment in _MATH.finditer(problem):
        inside = next(group for group in segment.groups() if group is not None)
        found.update(char for char in _WORDS_IN_MATH.sub(" ", inside) if char.isalpha())
    outside = _WORDS_IN_MATH.sub(" ", _MATH.sub(" ", problem))
    for word in _LONE_LETTER.findall(outside):
        if word.lower() not in _SHORT_WORDS:
            found.update(word)
    return frozenset(found)


def integer_form(value: ExactSum, taken: Set[str]) -> IntegerForm:
    """The form of a value that is no integer.

    Args:
        value: what the answer says.
        taken: letters of the problem.

    Raises:
        AnswerError: the value divides by a symbol, or needs more letters than there are.
    """
    assert value.as_integer is None, "an integer needs no form"
    free = [x for x in PREFERRED_LETTERS if x not in taken and x not in value.symbols]
    letters = iter(free[:MOST_LETTERS])
    denominator = math.lcm(*(factor.denominator for _, factor in value.terms))
    chosen: list[tuple[str, int]] = []
    try:
        top = _numerator(value, denominator, letters, chosen)
        if denominator > 1:
            low = next(letters)
            chosen.append((low, denominator))
            sign, top = ("-", top[1:]) if len(value.terms) == 1 and top[0] == "-" else ("", top)
            top = f"{sign}\\frac{{{top}}}{{{low}}}"
    except StopIteration:
        raise AnswerError(
            "unsupported", f"needs more than {len(free[:MOST_LETTERS])} letters"
        ) from None
    return IntegerForm(
        template=top,
        coefficients=tuple(chosen),
        conditions=_conditions(value, denominator),
        integer=sum(number for _, number in chosen),
    )


def _numerator(
    value: ExactSum, denominator: int, letters: Iterator[str], chosen: list[tuple[str, int]]
) -> str:
    """Terms over the common denominator; a positive one first, if there is any."""
    terms = sorted(value.terms, key=lambda term: (term[1] < 0, *_order(term[0])))
    text = ""
    for (radicand, powers), factor in terms:
        size = abs(factor.numerator * (denominator // factor.denominator))
        term = ""
        if size > 1 or radicand == 1:
            letter = next(letters)
            chosen.append((letter, size))
            term = letter
        if radicand > 1:
            letter = next(letters)
            chosen.append((letter, radicand))
            term += f"\\sqrt{{{letter}}}"
        for name, power in powers:
            if power < 0:
                raise AnswerError("unsupported", f"divides by {name}")
            term += f"{name} " if power == 1 else f"{name}^{{{power}}} "
        text += ("-" if factor < 0 else "+" if text else "") + term.strip()
    return text


def _order(monomial: Monomial) -> tuple[int, tuple[tuple[str, int], ...], int]:
    """Highest powers first, then the smaller radicand: x^2, x, 1, sqrt(2)."""
    radicand, powers = monomial
    return -sum(power for _, power in powers), powers, radicand


def _conditions(value: ExactSum, denominator: int) -> tuple[Condition, ...]:
    sizes = [abs(factor * denominator) for _, factor in value.terms]
    omitted = any(
        size == Fraction(1) and radicand > 1
        for size, ((radicand, _), _) in zip(sizes, value.terms, strict=True)
    )
    found: list[Condition] = []
    if denominator > 1 and not omitted:
        found.append("coprime")
    if any(radicand > 1 for (radicand, _), _ in value.terms):
        found.append("square_free")
    return tuple(found)
