from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings

from megatron_dapo.data.answer_parser import AnswerError, parse_answer
from megatron_dapo.data.exact_sum import ExactSum
from megatron_dapo.data.integer_form import integer_form, letters_of
from tests.unit.data.test_exact_sum import values

FORMS = [
    ("11-2\\sqrt{6}", "m-n\\sqrt{k}", (11, 2, 6), 19),
    ("\\frac{6}{8}", "\\frac{m}{n}", (3, 4), 7),
    ("-\\frac{1}{2}", "-\\frac{m}{n}", (1, 2), 3),
    ("\\frac{1+\\sqrt{5}}{2}", "\\frac{m+\\sqrt{n}}{k}", (1, 5, 2), 8),
    ("\\sqrt{12}", "m\\sqrt{n}", (2, 3), 5),
    ("\\frac{\\sqrt{3}}{2}", "\\frac{\\sqrt{m}}{n}", (3, 2), 5),
    ("\\sqrt{2}-1", "\\sqrt{m}-n", (2, 1), 3),
    ("-1-\\sqrt{2}", "-m-\\sqrt{n}", (1, 2), 3),
    ("\\frac{2\\sqrt{7}-3}{5}", "\\frac{m\\sqrt{n}-k}{p}", (2, 7, 3, 5), 17),
    ("\\frac{3\\pi}{4}", "\\frac{m\\pi}{n}", (3, 4), 7),
    ("(x+1)^2", "mx^{2}+nx+k", (1, 2, 1), 4),
    ("0.125", "\\frac{m}{n}", (1, 8), 9),
]


@pytest.mark.parametrize(("answer", "template", "numbers", "integer"), FORMS)
def test_the_form_of_an_answer(
    answer: str, template: str, numbers: tuple[int, ...], integer: int
) -> None:
    form = integer_form(parse_answer(answer).value, frozenset())
    assert form.template == template
    assert tuple(number for _, number in form.coefficients) == numbers
    assert form.integer == integer


@settings(deadline=None)
@given(values)
def test_coefficients_put_into_the_form_give_the_answer_back(value: ExactSum) -> None:
    assume(value.as_integer is None)
    try:
        form = integer_form(value, frozenset("m"))
    except AnswerError as error:
        assert "letters" in error.detail
        return
    assert "m" not in form.letters
    assert all(number > 0 for _, number in form.coefficients)
    assert form.integer == sum(number for _, number in form.coefficients)
    numbers = dict(form.coefficients)
    filled = re.sub(
        r"\\[a-z]+|[a-z]",
        lambda found: f"{{({numbers[found[0]]})}}" if found[0] in numbers else found[0],
        form.template,
    )
    assert parse_answer(filled).value == value


def test_conditions_make_the_letters_unique() -> None:
    def conditions(answer: str) -> tuple[str, ...]:
        return integer_form(parse_answer(answer).value, frozenset()).conditions

    assert conditions("\\frac{1}{2}") == ("coprime",)
    assert conditions("2\\sqrt{3}") == ("square_free",)
    assert conditions("\\frac{2+3\\sqrt{5}}{7}") == ("coprime", "square_free")
    assert conditions("\\frac{\\sqrt{3}}{2}") == ("square_free",)


def test_letters_of_the_problem_are_not_used_again() -> None:
    problem = "Let $m$ be a root of $nx+\\text{kp}$ and q a point. If so, find $AB$ for a circle."
    assert letters_of(problem) == set("mnxqAB")
    form = integer_form(parse_answer("\\frac{1}{2}").value, letters_of(problem))
    assert form.letters == ("k", "p")


def test_forms_without_an_honest_question_are_refused() -> None:
    for answer in ("\\frac{20}{\\pi}", "\\sqrt2+2\\sqrt3+3\\sqrt5+7\\sqrt{11}"):
        with pytest.raises(AnswerError, match="unsupported"):
            integer_form(parse_answer(answer).value, frozenset())
