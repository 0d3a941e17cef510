"""When do two problems ask the same? A normal form that keeps everything that changes a value."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_dapo.data.prompt_format import bare_problem

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
        **{"×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "−": "-"},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "π": r"\pi ", "∞": r"\infty "},
        **{"√": r"\sqrt ", "°": r"\circ ", "²": "^2", "³": "^3", "’": "'", "′": "'"},
    }
)
_MARKUP = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|,|;|:|!|q?quad)(?![a-z])"
    r"|\\[()\[\]]"
)
_SPELLINGS = (
    (
        re.compile(
            r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname) ?"
            r"\{([^{}]*)\}"
        ),
        r" \1 ",
    ),
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\(l|g|n)eq(?![a-z])"), r"\\\1e"),
    (re.compile(r"(?<![0-9,])([0-9]{1,3})((?:(?:\{,\}|,)[0-9]{3})+)(?![0-9]|,[0-9])"), ""),
    (re.compile(r"\{ *([0-9a-z]|[0-9]+) *\}"), r" \1 "),
)
_MARKS = re.compile(r"[^0-9]")
_WORDS = re.compile(
    r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
    r"|[^\W\d_]+"
    r"|(?<=[0-9)}])!|(?<=(?<![a-z])[a-z])!"  # a factorial, not an exclamation
    r"|(?<=(?<![a-z])[a-z])'+(?![a-z])"  # a derivative, not a possessive
    r"|(?<![a-z][a-z])-|-(?![a-z][a-z])"  # a minus, not a hyphen
    r"|(?<=[0-9]):(?=[0-9])"
    r"|[+*/^=<>()\[\]{}|%~]"
    r"|[^\x00-\x7f\w\s]"
)
_SILENT = re.compile("[\u2000-\u206f\u3000-\u3003\uff01\uff0c\uff0e\uff1a\uff1b\uff1f]")
"""Punctuation outside ASCII: it says nothing about a value."""


def question_words(text: str) -> list[str]:
    """Words, numbers and operators of a problem, in lower case and without markup.

    DAPO's instruction, blanks, sentence punctuation and the dollar signs of LaTeX are not in it.
    Operators, decimal points, brackets, factorials and letters of any script are, because
    "1+1" and "1-1", "1.5" and "15", or two problems in Chinese are different questions.
    """
    text = bare_problem(text)
    if not text.isascii():
        text = _SILENT.sub(" ", text.translate(_CHARACTERS))
    text = _MARKUP.sub(" ", text.lower())
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling or _without_marks, text)
    return _WORDS.findall(text)


def _without_marks(number: re.Match[str]) -> str:
    return _MARKS.sub("", number.group())


def question_key(texts: Sequence[str]) -> str:
    """One string for everything that asks the same as the messages `texts`."""
    return "\n".join(" ".join(question_words(text)) for text in texts)
