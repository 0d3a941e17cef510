from __future__ import annotations

import pytest

from megatron_dapo.data.prompt_format import dapo_prompt
from megatron_dapo.data.question_key import question_key

SAME = [
    ("What is $1+1$?", "what is 1 + 1"),
    ("Find  $x^{2}$.", "Find \\(x^2\\)!"),
    ("\\dfrac{1}{2}", "\\frac{1}{2}"),
    ("at most 1,000,000 apples", "at most 1000000 apples"),
    ("at most $1{,}000$ apples", "at most 1000 apples"),
    ("\\left( a \\leq b \\right)", "(a \\le b)"),
    ("2 − 1", "2 - 1"),
    ("x ≤ y", "$x \\le y$"),
    ("the well-known number", "the well known number"),
    ("Bob's car", "Bob’s car"),
    ("$\\text{area}$", "area"),
    ("求和。", "求和"),
    (dapo_prompt("How many?"), "How many?"),
]
DIFFERENT = [
    ("1+1", "1-1"),
    ("2*3", "2/3"),
    ("2n - 1", "2n + 1"),
    ("x > 1", "x < 1"),
    ("1.5 apples", "15 apples"),
    ("5! ways", "5 ways"),
    ("n! ways", "n ways"),
    ("f'(x)", "f(x)"),
    ("x-y", "xy"),
    ("f(1,2)", "f(12)"),
    ("1:2", "1 2"),
    ("2^{3x}", "2^{3}x"),
    ("10\\%", "10"),
    ("将两个相同的白球", "十边形内任意三条"),
    ("$\\frac{12}{3}$", "$\\frac{1}{23}$"),
    ("1,2,3", "123"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_case_blanks_and_markup_do_not_make_another_question(one: str, other: str) -> None:
    assert question_key([one]) == question_key([other])


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_changes_the_value_makes_another_question(one: str, other: str) -> None:
    assert question_key([one]) != question_key([other])


def test_messages_are_not_run_together() -> None:
    assert question_key(["1", "2"]) != question_key(["1 2"])
