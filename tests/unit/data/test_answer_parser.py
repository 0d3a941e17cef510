from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.data.answer_parser import AnswerError, parse_answer
from megatron_dapo.data.rows import Row, read_rows

RATIONALS = [
    ("42", 42, ""),
    ("-7", -7, ""),
    ("1,234", 1234, ""),
    ("1{,}024", 1024, ""),
    ("0.25", Fraction(1, 4), ""),
    ("1/2", Fraction(1, 2), ""),
    ("\\dfrac{3}{4}", Fraction(3, 4), ""),
    ("-\\frac12", Fraction(-1, 2), ""),
    ("1\\frac{1}{2}", Fraction(3, 2), ""),
    ("$\\boxed{7}$", 7, ""),
    ("x = 5", 5, ""),
    ("f(x) = \\frac{2}{3}", Fraction(2, 3), ""),
    ("2^{10}", 1024, ""),
    ("5!", 120, ""),
    ("336^\\circ", 336, "degrees"),
    ("90 degrees", 90, "degrees"),
    ("25\\%", 25, "%"),
    ("12 cm", 12, "cm"),
    ("12\\text{ cm}^2", 12, "cm"),
    ("\\$5", 5, ""),
    ("3 \\cdot 4", 12, ""),
    ("\\sqrt{49}", 7, ""),
    ("4^{1/2}", 2, ""),
    ("−3", -3, ""),
    ("½", Fraction(1, 2), ""),
]
SURDS = [
    ("11-2\\sqrt{6}", {6: -2, 1: 11}),
    ("\\frac{1+\\sqrt{5}}{2}", {1: Fraction(1, 2), 5: Fraction(1, 2)}),
    ("\\sqrt{12}", {3: 2}),
    ("sqrt(2)/2", {2: Fraction(1, 2)}),
    ("\\frac{1}{1+\\sqrt2}", {1: -1, 2: 1}),
    ("2\\sqrt3 + 3 √2", {3: 2, 2: 3}),
]
REFUSED = [
    ("blue", "text"),
    ("\\text{Yes}", "text"),
    ("B", "text"),
    ("no", "text"),
    ("3 or 4", "several"),
    ("(1,2)", "several"),
    ("3 \\pm \\sqrt2", "several"),
    ("x < 3", "relation"),
    ("5x-7y=4", "relation"),
    ("1/2x", "ambiguous"),
    ("12.5\\%", "ambiguous"),
    ("2\\frac{4}{3}", "ambiguous"),
    ("2\\sqrt[3]{2}", "unsupported"),
    ("\\ln 2", "unsupported"),
    ("1+2i", "unsupported"),
    ("9^{9^{9}}", "unsupported"),
    ("9999!", "unsupported"),
    ("\\frac{1}{0}", "unsupported"),
    ("40_9", "unreadable"),
    ("1.5.2", "unreadable"),
    ("\\frac{1}{", "unreadable"),
    ("", "unreadable"),
    ("(" * 300, "unreadable"),
    ("1" * 600, "unreadable"),
]


@pytest.mark.parametrize(("text", "value", "unit"), RATIONALS)
def test_numbers_are_read_exactly(text: str, value: Fraction | int, unit: str) -> None:
    parsed = parse_answer(text)
    assert parsed.value.as_rational == value
    assert parsed.unit == unit


@pytest.mark.parametrize(("text", "terms"), SURDS)
def test_surds_are_read_exactly(text: str, terms: dict[int, Fraction]) -> None:
    read = {radicand: factor for (radicand, _), factor in parse_answer(text).value.terms}
    assert read == terms


def test_polynomials_and_constants_keep_their_symbols() -> None:
    assert parse_answer("(x+1)^2").value == parse_answer("x^2 + 2x + 1").value
    assert parse_answer("\\frac{3\\pi}{4}").value.symbols == {"\\pi"}
    assert parse_answer("3pi/4").value == parse_answer("\\frac{3π}{4}").value


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_what_is_no_one_exact_value_is_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(AnswerError) as raised:
        parse_answer(text)
    assert raised.value.reason == reason


PIECES = [
    *("1", "23", "0.5", "x", "e", "i", "\\pi", "\\sqrt", "\\frac", "{", "}", "(", ")", "[", "]"),
    *("+", "-", "*", "/", "^", "!", "\\cdot ", ",", "=", "\\text{cm}", "%", " ", "$", "\\", "_"),
    *("\\left", "√", "π", "٣", "\x00", "999999999999999999999"),
]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_answer(text)
    except AnswerError as error:
        assert error.reason


def test_long_hostile_answers_are_read_or_refused() -> None:
    choose = random.Random(0)
    for _ in range(300):
        text = "".join(choose.choices(PIECES, k=150))
        try:
            parse_answer(text)
        except AnswerError as error:
            assert error.reason


def test_answers_of_math_500(shared_data: Path) -> None:
    counts: Counter[str] = Counter()
    for row in read_rows(
        shared_data / "math_500.jsonl",
        prompt_column="prompt",
        answer_column="reward_model.ground_truth",
    ):
        assert isinstance(row, Row)
        try:
            whole = parse_answer(row.answer).value.as_integer is not None
            counts["integer" if whole else "exact"] += 1
        except AnswerError as error:
            counts[error.reason] += 1
    assert counts["integer"] == 333  # 327 are digits only; 4 have thousands marks, 2 are powers
    assert counts["exact"] >= 110
    assert counts.total() == 500
