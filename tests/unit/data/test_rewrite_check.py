from __future__ import annotations

import re

import pytest

from megatron_dapo.data.answer_parser import parse_answer
from megatron_dapo.data.integer_form import integer_form, letters_of
from megatron_dapo.data.rewrite_check import RewriteError, check_rewrite, read_sections
from megatron_dapo.data.rewrite_prompt import correction, examples, rewrite_messages

PROBLEM = "A square has a side of length $\\sqrt{6}-1$. What is its area, increased by 4?"
ANSWER = "11-2\\sqrt{6}"
VALUE = parse_answer(ANSWER).value
FORM = integer_form(VALUE, letters_of(PROBLEM))
GOOD = examples()[0][1]


def check(reply: str, problem: str = PROBLEM) -> tuple[str, int]:
    rewrite = check_rewrite(problem, VALUE, FORM, reply)
    return rewrite.problem, rewrite.integer


@pytest.mark.parametrize("number", [0, 1])
def test_the_worked_examples_pass_their_own_check(number: int) -> None:
    request, reply = examples()[number]
    problem = request.partition("Problem:\n")[2].partition("\n\nAnswer:")[0]
    answer = request.partition("\nAnswer: ")[2].partition("\n")[0]
    value = parse_answer(answer).value
    form = integer_form(value, letters_of(problem))
    assert f"Form: {form.template}\n" in request
    assert f"Ask for: {form.question}" in request
    assert check_rewrite(problem, value, form, reply).integer == form.integer
    assert rewrite_messages(problem, answer, form)[-1]["content"] == request


def test_a_good_reply_gives_the_problem_and_the_integer() -> None:
    problem, integer = check(GOOD)
    assert problem.startswith("A square has a side")
    assert integer == 19


def test_other_free_letters_and_another_layout_are_as_good() -> None:
    other = re.sub(
        r"(?<![a-zA-Z\\])([mnk])(?![a-zA-Z])", lambda x: {"m": "p", "n": "q", "k": "r"}[x[0]], GOOD
    )
    assert check(other)[1] == 19
    bold = GOOD.replace("## Final answer\n19", "**Final answer:** $19$.")
    assert check(bold)[1] == 19
    dollars = GOOD.replace("m-n\\sqrt{k}\n", "$m - n \\sqrt{k}$\n", 1)
    assert check(dollars)[1] == 19


FAULTS = [
    ("sections", "## Answer format\nm-n\\sqrt{k}\n", ""),
    ("sections", "## Final answer", "## Final answer\n18\n## Final answer"),
    ("not_integer", "\n19", "\nnineteen"),
    ("not_integer", "\n19", "\n19.5"),
    ("not_integer", "\n19", "\n" + "9" * 20_000),
    ("coefficients", "k = 6", "that is it"),
    ("coefficients", "m = 11", "m = " + "1" * 20_000),
    ("coefficients", "n = 2", "n = 2, n = 3"),
    ("derivation", "m = 11", "m = 12"),
    ("derivation", "m-n\\sqrt{k}\n", "m+n\\sqrt{k}\n"),
    ("ambiguous", "n = 2, k = 6", "n = 1, k = 24"),
    ("sum", "\n19", "\n20"),
    ("statement", "$m-n\\sqrt{k}$", "$m-n \\cdot k$"),
    ("statement", "Find $m+n+k$", "Find $m+n$"),
    ("conditions", "positive integers", "numbers"),
    ("conditions", "not divisible by the square of any prime", "not small"),
    ("changed", "increased by 4, ", ""),
    (
        "changed",
        "A square has a side of length $\\sqrt{6}-1$. Its area, increased by 4,",
        "6 1 4 it",
    ),
    ("leak", "Find $m+n+k$", "Note that $k = 6$. Find $m+n+k$"),
    ("leak", "Find $m+n+k$", "Find $m+n+k$, which is 19"),
    ("leak", "increased by 4, can", "increased by 4, is $11-2\\sqrt{6}$ and can"),
]


@pytest.mark.parametrize(("reason", "old", "new"), FAULTS)
def test_each_fault_is_found_under_its_name(reason: str, old: str, new: str) -> None:
    assert old in GOOD
    with pytest.raises(RewriteError) as raised:
        check(GOOD.replace(old, new))
    assert raised.value.reason == reason
    assert reason in correction(GOOD, raised.value)[1]["content"]


def test_letters_of_the_problem_clash() -> None:
    with pytest.raises(RewriteError, match="clash: the problem already uses n"):
        check(GOOD, PROBLEM.replace("A square", "For $n=1$ a square"))


def test_an_unreduced_fraction_is_ambiguous() -> None:
    value = parse_answer("\\frac{1}{2}").value
    reply = examples()[1][1].replace("m = 1, n = 6", "m = 2, n = 4").replace("\n7", "\n6")
    problem = "Two fair dice are rolled. What is the probability that the sum of the numbers is 7?"
    with pytest.raises(RewriteError, match="ambiguous"):
        check_rewrite(problem, value, integer_form(value, frozenset()), reply)


def test_thoughts_before_the_headings_do_not_count() -> None:
    sections = read_sections(f"<think>\nFinal answer: 7</think>\n{GOOD}")
    assert sections["Final answer"] == "19"


@pytest.mark.parametrize(("old", "new"), [("largest", "smallest"), ("distinct ", ""), ("not ", "")])
def test_a_word_that_decides_on_the_answer_must_stay(old: str, new: str) -> None:
    problem = (
        "Of all squares that are not red, with four distinct corners on a circle of radius "
        "$\\sqrt{6}-1$, what is the area of the largest, increased by 4?"
    )
    asked = (
        "Of all squares that are not red, with four distinct corners on a circle of radius "
        "$\\sqrt{6}-1$, the area of the largest, increased by 4, can be written in the form "
        "$m-n\\sqrt{k}$, where $m$, $n$ and $k$ are positive integers and $k$ is square-free. "
        "Find $m+n+k$."
    )
    before = GOOD.partition("## Transformed problem\n")[0]
    after = GOOD.partition("## Answer calculation\n")[2]
    reply = "{}## Transformed problem\n{}\n## Answer calculation\n{}"
    assert check(reply.format(before, asked, after), problem) == (asked, 19)
    assert old in asked
    with pytest.raises(RewriteError, match="changed: words of the problem are missing"):
        check(reply.format(before, asked.replace(old, new), after), problem)
