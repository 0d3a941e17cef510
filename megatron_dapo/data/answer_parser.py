"""What a written answer says, exactly: numbers, fractions, surds, polynomials, units, percentages.

LaTeX and plain text. An answer that is several values, words, or outside exact arithmetic raises
`AnswerError` with a reason; nothing is guessed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megatron_dapo.data.exact_sum import ExactSum, Unsupported

AnswerReason = Literal["text", "several", "relation", "ambiguous", "unsupported", "unreadable"]
LONGEST_ANSWER = 512
_DEEPEST = 24
_LARGEST_FACTORIAL = 100


class AnswerError(Exception):
    """An answer that cannot be read as one exact value."""

    def __init__(self, reason: AnswerReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: AnswerReason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """One exact value, and the unit that it was given in."""

    value: ExactSum
    unit: str
    """Empty, "%", or a unit such as "cm" or "degrees"."""


_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2013\uff0d", "-"),
        **{"×": "*", "·": "*", "⋅": "*", "÷": "/", "π": "\\pi ", "√": "\\sqrt ", "°": "\\circ "},
        **{"²": "^2", "³": "^3", "½": "\\frac{1}{2}", "\u00a0": " ", "。": "."},
    }
)
_MARKUP = re.compile(
    r"\\(?:left|right|displaystyle|,|;|:|!|q?quad)(?![a-zA-Z])|\\[()\[\]]|\$\$?|\\ |~"
)
_BOX = re.compile(r"\\(?:boxed|fbox) ?\{(.*)\}", re.DOTALL)
_SPELLINGS = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:cdot|times)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\(?:mathrm|text|mathbf) ?\{ ?(e|i)\ ?}"), r"\1"),
    (re.compile(r"(?<![a-zA-Z\\])(sqrt|pi)(?![a-zA-Z])"), r"\\\1 "),
)
_THOUSANDS = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:(?:\{,\}|,)[0-9]{3})+)(?![0-9]|,[0-9])")
_NAMED = re.compile(r" *(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\{?\w+\}?)? *(?:\([a-zA-Z]\))? *=(?!=)")
_PERCENT = re.compile(r" *(?:\\?%|\\text\{ *\\?%\}|percent)$")
_DEGREES = re.compile(r" *\^? ?(?:\{ *\\circ *\}|\\circ)$|(?<=[0-9)}]) *degrees?$")
_TEXT_UNIT = re.compile(
    r" *\\(?:text|mathrm|textbf|mbox) ?\{ *([A-Za-z][A-Za-z ./]*?)\.? *\}(?:\^(?:[23]|\{[23]\}))?$"
)
_PLAIN_UNIT = re.compile(r"(?<=[0-9)}]) +([A-Za-z]{2}[A-Za-z ./]*?)(?:\^(?:[23]|\{[23]\}))?$")
_CURRENCY = re.compile(r"^ *\\\$ *")
_NOT_UNITS = frozenset(["or", "and", "to", "if", "for", "mod", "where", "with", "in", "base"])
_SEVERAL = re.compile(r",|;|\\pm|\\mp|±|\\cup|\\{|\bor\b|\band\b|\\(?:text|mathrm) ?\{ *(?:or|and)")
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|in|approx|equiv|sim)(?:q|slant)?(?![a-zA-Z])|≤|≥|≈")
_TOKEN = re.compile(r" *(?:(\d+(?:\.\d+)?|\.\d+)|(\\[a-zA-Z]+)|([a-zA-Z]+)|([-+*/^!(){}\[\]|]))")


def parse_answer(text: str) -> ParsedAnswer:
    """The one exact value that `text` states.

    Raises:
        AnswerError: it states none, several, a relation, or one that is not computed exactly.
    """
    if len(text) > LONGEST_ANSWER:
        raise AnswerError("unreadable", f"{len(text)} characters, at most {LONGEST_ANSWER}")
    text, unit = _without_unit(_plain(text))
    if not text:
        raise AnswerError("unreadable", "nothing there")
    if re.fullmatch(r"[a-zA-Z]{1,2}", text):
        raise AnswerError("text", f"{text}: a choice or a word")
    if _SEVERAL.search(text):
        raise AnswerError("several", text)
    named = _NAMED.match(text)
    text = text[named.end() :] if named else text
    if _RELATION.search(text):
        raise AnswerError("relation", text)
    try:
        value = _Parser(text).parse()
    except Unsupported as error:
        raise AnswerError("unsupported", f"{text}: {error}") from error
    if unit == "%" and value.as_integer is None:
        raise AnswerError("ambiguous", f"{text} percent: its digits, or a hundredth of them?")
    return ParsedAnswer(value, unit)


def _plain(text: str) -> str:
    text = text.translate(_CHARACTERS).strip()
    currency = _CURRENCY.match(text)
    text = text[currency.end() :] if currency else text
    text = _MARKUP.sub(" ", text.replace("\\$", " "))
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = text.strip().rstrip(".").strip()
    if box := _BOX.fullmatch(text):
        text = box[1]
    return _THOUSANDS.sub(lambda found: re.sub("[^0-9]", "", found.group()), text).strip()


def _without_unit(text: str) -> tuple[str, str]:
    if found := _PERCENT.search(text):
        return text[: found.start()].strip(), "%"
    if found := _DEGREES.search(text):
        return text[: found.start()].strip(), "degrees"
    for pattern in (_TEXT_UNIT, _PLAIN_UNIT):
        found = pattern.search(text)
        if found and found.start() and _NOT_UNITS.isdisjoint(found[1].lower().split()):
            return text[: found.start()].strip(), found[1].strip()
    return text, ""


class _Parser:
    """Recursive descent over one answer; every step consumes a token or raises."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split(text))
        self._at = 0
        self._depth = 0

    def _split(self, text: str) -> list[str]:
        tokens, end, text = [], 0, text.rstrip()
        while end < len(text):
            found = _TOKEN.match(text, end)
            if found is None:
                raise AnswerError("unreadable", f"{text!r} at {text[end : end + 10]!r}")
            token, end = found.group().strip(), found.end()
            if found[3] and len(token) > 2:
                raise AnswerError("text", text)
            tokens += list(token) if found[3] else [token]
        return tokens

    def parse(self) -> ExactSum:
        value = self._sum()
        if self._at < len(self._tokens):
            raise AnswerError("unreadable", f"{self._text!r} at {self._peek()!r}")
        return value

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, token: str = "") -> str:
        found = self._peek()
        if not found or (token and found != token):
            wanted = token or "something"
            raise AnswerError("unreadable", f"{self._text!r}: {wanted} expected at {found!r}")
        self._at += 1
        return found

    def _sum(self) -> ExactSum:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise AnswerError("unreadable", "nested too deeply")
        negative = self._peek() in ("-", "+") and self._take() == "-"
        value = self._product()
        value = -value if negative else value
        while self._peek() in ("+", "-"):
            plus = self._take() == "+"
            term = self._product()
            value = value + term if plus else value - term
        self._depth -= 1
        return value

    def _product(self) -> ExactSum:
        value = self._factor()
        divided = False
        while token := self._peek():
            if token in "*/":
                self._take()
                factor = self._factor()
                value = value * factor if token == "*" else value / factor
                divided = token == "/"
            elif token[0].isalnum() or token[0] == "\\" or token in "({":
                if divided or token[0].isdigit() or token[0] == ".":
                    raise AnswerError("ambiguous", f"{self._text!r} at {token!r}")
                value = self._beside(value, token)
            else:
                break
        return value

    def _beside(self, value: ExactSum, token: str) -> ExactSum:
        """Two factors side by side: a product, or a mixed number."""
        whole = self._tokens[self._at - 1].isdecimal() and value.as_integer is not None
        factor = self._factor()
        share = factor.as_rational
        if token == "\\frac" and whole and share is not None:
            if not 0 < share < 1:
                raise AnswerError("ambiguous", f"{self._text!r}: a mixed number or a product?")
            return value + factor
        return value * factor

    def _factor(self) -> ExactSum:
        if self._peek() == "-":
            self._take()
            return -self._factor_of_power()
        return self._factor_of_power()

    def _factor_of_power(self) -> ExactSum:
        value = self._atom()
        while self._peek() == "!":
            self._take()
            number = value.as_integer
            if number is None or not 0 <= number <= _LARGEST_FACTORIAL:
                raise Unsupported("a factorial that is no small number's")
            value = ExactSum.rational(math.factorial(number))
        if self._peek() != "^":
            return value
        self._take()
        exponent = self._group().as_rational
        if exponent == Fraction(1, 2):
            return value.sqrt()
        if exponent is None or exponent.denominator != 1:
            raise Unsupported("an exponent that is no integer")
        return value ** int(exponent)

    def _group(self) -> ExactSum:
        """An argument: {...}, (...), or one digit or letter."""
        token = self._peek()
        if token.isdecimal() and len(token) > 1:  # \frac12, x^23: one digit each
            self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
        return self._atom()

    def _atom(self) -> ExactSum:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return ExactSum.rational(Fraction(token))
        if token in ("(", "{", "["):
            value = self._sum()
            self._take({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if token == "\\frac":
            top = self._group()
            return top / self._group()
        if token == "\\sqrt":
            if self._peek() == "[":
                raise Unsupported("a root that is no square root")
            return self._group().sqrt()
        if token == "\\pi":
            return ExactSum.symbol("\\pi")
        if len(token) == 1 and token.isalpha():
            if token == "i":
                raise Unsupported("a complex number")
            return ExactSum.symbol(token)
        if token.startswith("\\"):
            raise Unsupported(token)
        raise AnswerError("unreadable", f"{self._text!r} at {token!r}")
