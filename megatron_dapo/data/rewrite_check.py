"""Is a rewritten problem right? Everything that a machine can check of a model's reply."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_dapo.data.answer_parser import AnswerError, parse_answer
from megatron_dapo.data.exact_sum import ExactSum
from megatron_dapo.data.integer_form import Condition, IntegerForm, letters_of
from megatron_dapo.data.question_key import question_words

RewriteReason = Literal[
    "sections",
    "not_integer",
    "coefficients",
    "clash",
    "derivation",
    "ambiguous",
    "sum",
    "statement",
    "conditions",
    "changed",
    "leak",
]
SECTIONS = (
    "Transformation thought process",
    "Answer format",
    "Transformed problem",
    "Answer calculation",
    "Final answer",
)
"""Headings of a reply, those of the paper's appendix."""
LEAST_KEPT = 0.6
"""Share of the original problem's words that must be in the rewritten one."""
HARMLESS_NUMBERS = frozenset(["0", "1"])
"""That conditions may bring: "positive", "greater than 1", "\\gcd(m,n)=1"."""
DECISIVE_WORDS = frozenset(
    [
        *("not", "no", "never", "without", "except", "only", "exactly", "least", "most"),
        *("maximum", "minimum", "maximal", "minimal", "largest", "smallest", "greatest"),
        *("longest", "shortest", "fewer", "less", "more", "greater", "even", "odd", "distinct"),
        *("different", "negative", "nonnegative", "increasing", "decreasing", "inside", "outside"),
    ]
)
"""Another problem without them. Words that our conditions bring too, such as prime, are none."""
_HEADING = re.compile(
    rf"^[#* \t]*({'|'.join(SECTIONS)})[* \t]*(?::[* \t]*|$)", re.IGNORECASE | re.MULTILINE
)
_DIGITS = "-?[0-9]{1,1000}+"
"""Of an integer; a model that writes digits without end has written none."""
_INTEGER = re.compile(rf"\$?\s*({_DIGITS})\s*\$?\.?")
_ASSIGNED = re.compile(rf"(?<![A-Za-z\\{{^_])([A-Za-z])\s*=\s*({_DIGITS})(?![0-9.]*[0-9])")
_LETTER = re.compile(r"(\\[a-zA-Z]+)|([a-zA-Z])")
_STATED: Mapping[Condition, re.Pattern[str]] = {
    "coprime": re.compile(
        r"relatively prime|co-?prime|lowest terms|simplest form|common divisor|\\gcd|gcd\(|互质",
        re.IGNORECASE,
    ),
    "square_free": re.compile(
        r"square-?\s?free|not divisible by the square|no square|simplest radical|perfect square",
        re.IGNORECASE,
    ),
}
_POSITIVE = re.compile(r"positive\s+integers?|natural numbers?|正整数", re.IGNORECASE)


class RewriteError(Exception):
    """A reply that must not be used, with the reason."""

    def __init__(self, reason: RewriteReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: RewriteReason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A problem with an integer answer that passed every check."""

    problem: str
    integer: int
    form: str
    coefficients: tuple[tuple[str, int], ...]


def check_rewrite(problem: str, value: ExactSum, form: IntegerForm, reply: str) -> Rewrite:
    """The rewritten problem of `reply`, if all of it can be derived from the parsed answer.

    Checked are: the sections; an integer at the end; letters that the problem does not use;
    coefficients that give back exactly `value` when put into the stated form; that this form and
    these coefficients are the one canonical choice; their sum; that form, question and conditions
    stand in the rewritten problem; that the problem is otherwise the same; and that it does not
    give its answer away.

    Raises:
        RewriteError: the first check that failed.
    """
    sections = read_sections(reply)
    final = _INTEGER.fullmatch(sections["Final answer"])
    if final is None:
        raise RewriteError("not_integer", sections["Final answer"][:80])
    template = _unwrapped(sections["Answer format"])
    coefficients = _coefficients(template, sections["Answer calculation"], value)
    clash = sorted(set(coefficients) & letters_of(problem))
    if clash:
        raise RewriteError("clash", f"the problem already uses {', '.join(clash)}")
    _check_derivation(template, coefficients, value)
    _check_canonical(template, coefficients, form)
    if int(final[1]) != form.integer:
        raise RewriteError("sum", f"{final[1]}, but the coefficients add up to {form.integer}")
    rewritten = sections["Transformed problem"]
    _check_statement(rewritten, template, coefficients, form)
    _check_kept(problem, rewritten)
    _check_leak(problem, rewritten, template, coefficients)
    return Rewrite(rewritten, form.integer, template, tuple(coefficients.items()))


def read_sections(reply: str) -> dict[str, str]:
    """Text under each heading; what comes before the first, or is thought, does not count.

    Raises:
        RewriteError: a heading is missing, empty, or there twice.
    """
    reply = reply.rpartition("</think>")[2]
    headings = list(_HEADING.finditer(reply))
    names = {name.lower(): name for name in SECTIONS}
    found: dict[str, str] = {}
    for number, heading in enumerate(headings):
        end = headings[number + 1].start() if number + 1 < len(headings) else len(reply)
        name = names[heading[1].lower()]
        if name in found:
            raise RewriteError("sections", f"{name} is there twice")
        found[name] = reply[heading.end() : end].strip()
    for name in SECTIONS[1:]:
        if not found.get(name):
            raise RewriteError("sections", f"{name} is missing")
    return found


def _unwrapped(template: str) -> str:
    return re.sub(r"\$|\\[()\[\]]", "", template).strip().rstrip(".").strip()


def _coefficients(template: str, calculation: str, value: ExactSum) -> dict[str, int]:
    """Letters of the template, in its order, with the values that the calculation gives them."""
    letters = dict.fromkeys(
        found[2]
        for found in _LETTER.finditer(template)
        if found[2] and found[2] not in value.symbols
    )
    assigned: dict[str, int] = {}
    for letter, number in _ASSIGNED.findall(calculation):
        if letter in letters and assigned.setdefault(letter, int(number)) != int(number):
            raise RewriteError("coefficients", f"{letter} has two values")
    missing = [letter for letter in letters if letter not in assigned]
    if not letters or missing:
        what = f"no value of {', '.join(missing)}" if missing else "no letter in the form"
        raise RewriteError("coefficients", f"{what}: {template[:80]}")
    return {letter: assigned[letter] for letter in letters}


def _check_derivation(template: str, coefficients: Mapping[str, int], value: ExactSum) -> None:
    filled = _LETTER.sub(
        lambda found: (
            f"{{({coefficients[found[2]]})}}" if found[2] in coefficients else found.group()
        ),
        template,
    )
    try:
        derived = parse_answer(filled).value
    except AnswerError as error:
        raise RewriteError("derivation", str(error)) from error
    if derived != value:
        raise RewriteError("derivation", f"{filled} is not the original answer")


def _check_canonical(template: str, coefficients: Mapping[str, int], form: IntegerForm) -> None:
    if tuple(coefficients.values()) != tuple(number for _, number in form.coefficients):
        raise RewriteError(
            "ambiguous", f"{dict(coefficients)} in {template}, canonical is {form.template}"
        )
    renamed = dict(zip(coefficients, form.letters, strict=True))
    plain = _LETTER.sub(lambda found: renamed.get(found[2], found.group()), template)
    if _compact(plain) != _compact(form.template):
        raise RewriteError("ambiguous", f"the form is {template}, not {form.template}")


def _compact(text: str) -> str:
    """LaTeX without blanks, dollars and the variants of a fraction."""
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\(?:left|right|displaystyle|,|;|!|cdot)(?![a-zA-Z])|\*", "", text)
    return re.sub(r"\\[()\[\]]|[\s$]|\{(?=[a-zA-Z0-9]\})|(?<=\{[a-zA-Z0-9])\}", "", text)


def _check_statement(
    rewritten: str, template: str, coefficients: Mapping[str, int], form: IntegerForm
) -> None:
    compact = _compact(rewritten)
    if _compact(template) not in compact:
        raise RewriteError("statement", f"the problem does not state the form {template}")
    if not _asks_for(compact, tuple(coefficients)):
        raise RewriteError("statement", f"the problem does not ask for {'+'.join(coefficients)}")
    if not _POSITIVE.search(rewritten):
        raise RewriteError("conditions", "the letters are not said to be positive integers")
    for condition in form.conditions:
        if not _STATED[condition].search(rewritten):
            raise RewriteError("conditions", f"{condition} is not stated")


def _asks_for(compact: str, letters: tuple[str, ...]) -> bool:
    """Whether the sum of the letters is asked for, in any order; of one letter, its value."""
    if len(letters) == 1:
        return (
            re.search(rf"(?i:find|valueof|whatis|determine|compute|求){letters[0]}\b", compact)
            is not None
        )
    sums = re.findall(r"[a-zA-Z](?:\+[a-zA-Z])+", compact)
    return any(sorted(found.split("+")) == sorted(letters) for found in sums)


def _check_kept(problem: str, rewritten: str) -> None:
    if lost := list(_numbers(problem) - _numbers(rewritten)):
        raise RewriteError("changed", f"numbers of the problem are missing: {', '.join(lost)}")
    before, after = Counter(question_words(problem)), Counter(question_words(rewritten))
    if gone := [word for word in before - after if word in DECISIVE_WORDS]:
        raise RewriteError("changed", f"words of the problem are missing: {', '.join(gone)}")
    kept = (before & after).total() / max(before.total(), 1)
    if kept < LEAST_KEPT:
        raise RewriteError("changed", f"only {kept:.0%} of the problem's words are kept")


def _check_leak(
    problem: str, rewritten: str, template: str, coefficients: Mapping[str, int]
) -> None:
    """A new question needs no new numbers: they would be the answer, or parts of it."""
    for letter, number in _ASSIGNED.findall(re.sub(r"\$", " ", rewritten)):
        if letter in coefficients:
            raise RewriteError("leak", f"the problem says {letter}={number}")
    harmless = HARMLESS_NUMBERS.union(_numbers(template))
    added = _numbers(rewritten) - _numbers(problem)
    if told := [number for number in added if number not in harmless]:
        raise RewriteError("leak", f"numbers that the problem does not have: {', '.join(told)}")


def _numbers(text: str) -> Counter[str]:
    return Counter(word for word in question_words(text) if word[0].isdigit())
