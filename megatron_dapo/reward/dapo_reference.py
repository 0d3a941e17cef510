"""The published DAPO grader as a specification: same verdict on the same text, quirks included.

The answer is the last "Answer: ..." of the last 300 characters; answer and truth are both
normalised by plain text replacement, in this order, and compared as strings. So "1,2" equals "12",
and "042" does not equal "42": use it to reproduce published runs, and the integer grader otherwise.
"""

from __future__ import annotations

import re

WINDOW = 300
"""Characters at the end of a response that are read."""

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples"
)
_REMOVED = (
    *_UNITS.split(" "),
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)
_REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),  # the first $...$ of a line stands for the line
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def extract_reference_answer(response: str) -> str | None:
    """Normalised text of the last answer line in the last 300 characters; None without one.

    The published grader says "[INVALID]" there, which no truth equals either.
    """
    lines = _ANSWER.findall(response[-WINDOW:])
    return normalize_reference_answer(lines[-1]) if lines else None


def normalize_reference_answer(answer: str) -> str:
    """Canonical text of an answer, by the published replacements in their order."""
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for text in _REMOVED:
        answer = answer.replace(text, "")
    for pattern, replacement in _REWRITTEN:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()
