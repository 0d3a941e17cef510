"""Is the answer of a response the right one? Pure text work: no sympy, no signals, no state.

Numbers are compared as exact rationals, so "045", "45.0", "$45$", "**45**" and "45 degrees" all
equal 45, and "1,234" equals 1234, while "12,13", "4 or 5" and "5 4 0" are no numbers at all.
Truths that are not numbers are compared as normalised text. Only the end of a response is read, and
numbers have bounded length, so hostile text costs no more than ordinary text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megatron_dapo.reward.dapo_reference import (
    extract_reference_answer,
    normalize_reference_answer,
)

Style = Literal["answer_line", "boxed", "either", "dapo_reference"]
Reason = Literal["equal", "different", "unreadable", "not_found"]

WINDOW = 4096
"""Characters at the end of a response in which the answer is looked for."""
LONGEST_ANSWER = 512
"""Characters of an answer that are read; a longer one is not an integer anybody asked for."""


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Verdict on one response."""

    correct: bool
    extracted: str | None
    """Text that was read as the answer; None when there was none."""
    reason: Reason
    """unreadable: the truth is a number and the extracted text is not."""


def verify_answer(response: str, truth: str | int, *, style: Style = "answer_line") -> AnswerCheck:
    """Whether the answer in `response` equals `truth`. Never raises, whatever the response.

    Args:
        response: decoded response; thoughts before the last `</think>` are not answers.
        truth: ground truth, for DAPO-Math-17k an integer.
        style: answer_line reads the last "Answer:" line; boxed the last complete \\boxed{};
            either the later of the two; dapo_reference is the published grader to the letter.
    """
    truth = str(truth)
    if style == "dapo_reference":
        predicted = extract_reference_answer(response)
        if predicted is None:
            return AnswerCheck(False, None, "not_found")
        equal = predicted == normalize_reference_answer(truth)
        return AnswerCheck(equal, predicted, "equal" if equal else "different")
    extracted = extract_answer(response, style)
    if extracted is None:
        return AnswerCheck(False, None, "not_found")
    extracted = extracted.strip()[:LONGEST_ANSWER]
    expected, found = parse_number(truth), parse_number(extracted)
    if expected is not None and found is None:
        return AnswerCheck(False, extracted, "unreadable")
    equal = (
        found == expected if expected is not None else _canonical(extracted) == _canonical(truth)
    )
    return AnswerCheck(equal, extracted, "equal" if equal else "different")


def answer_value(text: str) -> Fraction | str:
    """What an answer says; equal values are the same answer, however they are written."""
    number = parse_number(text)
    return _canonical(text) if number is None else number


def may_be_equal(check: AnswerCheck, truth: str | int) -> bool:
    """Whether a wrong answer may be right in a notation that `verify_answer` does not read.

    Two different numbers are different, and several answers to a question with one are wrong.
    """
    if check.correct or check.extracted is None or len(check.extracted) >= LONGEST_ANSWER:
        return False
    if check.reason == "different" and parse_number(str(truth)) is not None:
        return False
    several = [bool(_SEVERAL.search(_plain(text))) for text in (check.extracted, str(truth))]
    return several[0] == several[1]


# --- where the answer stands --------------------------------------------------------------------

_LABEL = re.compile(r"answer[*_`\s]{0,8}[:：]", re.IGNORECASE)
_BRACE = re.compile(r"\\[{}]|\\(?:boxed|fbox) ?\{|[{}]")
_BOX = re.compile(r"\\(?:boxed|fbox) ?\{")
_DISPLAY = (("$$", "$$"), ("\\[", "\\]"))


def extract_answer(response: str, style: Style) -> str | None:
    """Text of the answer as it stands in the response, or None."""
    window = response[-WINDOW:].rpartition("</think>")[2]
    line = _answer_line(window) if style != "boxed" else None
    box = _last_box(window) if style != "answer_line" else None
    if line is not None and box is not None:
        box_is_later = box[0] >= line[0] + len(line[1])
        return box[1] if box_is_later else line[1]
    chosen = line or box
    return chosen[1] if chosen else None


def _answer_line(window: str) -> tuple[int, str] | None:
    """(start, text) of what follows the last "Answer:": its line, the next, or a display block."""
    end = _last_label(window)
    if end is None:
        return None
    text = window[end:].lstrip("*_` \t\r\n")
    start = len(window) - len(text)
    for opening, closing in _DISPLAY:
        if text.startswith(opening):
            end = text.find(closing, len(opening))
            if end > 0:
                return start, text[: end + len(closing)]
    line = text.partition("\n")[0]
    return (start, line) if line else None


def _last_label(window: str) -> int | None:
    """Where the last "Answer:" ends. From behind where lower case has the same places."""
    if not window.isascii():
        labels = list(_LABEL.finditer(window))
        return labels[-1].end() if labels else None
    lowered, end = window.lower(), len(window)
    while (start := lowered.rfind("answer", 0, end)) >= 0:
        if label := _LABEL.match(window, start):
            return label.end()
        end = start
    return None


def _last_box(window: str) -> tuple[int, str] | None:
    r"""(start, content) of the last complete \boxed{...}; of nested ones the outer."""
    first = _BOX.search(window)
    if first is None:
        return None
    open_braces: list[tuple[int, int] | None] = []  # a box's start and content, or a plain brace
    last = None
    for brace in _BRACE.finditer(window, first.start()):
        token = brace.group()
        if token == "}":
            if open_braces and (box := open_braces.pop()):
                last = (box[0], window[box[1] : brace.start()])
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(brace.span())
    return last


# --- what the text says -------------------------------------------------------------------------

_CHARACTERS = str.maketrans(
    {
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2009\u200a\u202f\u3000\t", " "),
        **{"\uff0b": "+", "\uff0c": ",", "\uff0e": ".", "\u3002": ".", "\uff1d": "=", "\u00b0": ""},
    }
)
_WRAPPER = re.compile(
    r"\\(?:text|mathrm|mathbf|mathit|textbf|textit|textrm|mbox|boxed|fbox) ?\{([^{}]*)\}"
    r"(\^(?:[23]|\{[23]\}))?"
)
_THIN_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,;:! ]|~)(?=[0-9]{3}(?![0-9]))")
_DROPPED = re.compile(
    r"<\|[^|<>]{0,32}\|>|\\(?:left|right|displaystyle|!)(?![a-z])|\^ ?\{?\\circ\}?|\\?%"
)
_BLANK = re.compile(r"\\[()\[\],;: $]|\\q?quad(?![a-z])|[*`$~]")
_FRACTION_NAME = re.compile(r"\\[dtc]frac")
_FRACTION_SHORT = re.compile(r"\\frac ?([0-9]) ?([0-9])")
_ROOT_SHORT = re.compile(r"\\sqrt ?([0-9a-zA-Z])")

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_SIGN = r"(?P<sign>[+-]?) *"
_UNIT = r"(?: +(?P<unit>[A-Za-z]{2}[A-Za-z ./-]*(?:\^\{?[23]\}?)?))?"
_DECIMAL = re.compile(rf"{_SIGN}(?P<value>{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+){_UNIT}")
_QUOTIENT = re.compile(
    rf"{_SIGN}(?:\\frac *\{{ *(?P<inner>[+-]?) *(?P<top>{_INTEGER}) *\}}"
    rf" *\{{ *(?P<low>{_INTEGER}) *\}}"
    rf"|(?P<over>{_INTEGER}) */ *(?P<under>{_INTEGER}))"
)
_POWER = re.compile(
    rf"{_SIGN}(?P<base>{_INTEGER}) *\^ *(?:\{{ *(?P<long>[0-9]{{1,4}}) *\}}|(?P<short>[0-9]))"
)
_NOT_UNITS = frozenset(
    [
        *("or", "and", "to", "not", "plus", "minus", "times", "over", "mod", "pi", "sqrt"),
        *("hundred", "thousand", "million", "billion", "dozen"),
    ]
)
_SHORT_UNITS = frozenset("mgsL")
_APART = re.compile(r"(?<=[0-9])\s+(?=[0-9])(?![0-9]{3}(?![0-9]))")
"""Blanks between two numbers, not before thousands: 3 1/2 is not 31/2."""
_SEVERAL = re.compile(r",(?![0-9]{3})|;|\band\b|\bor\b")


def parse_number(text: str) -> Fraction | None:
    """The one number that `text` states, exactly; None when it states none or several.

    Read are integers with thousands marks in groups of three, decimals, quotients and powers of
    integers, in LaTeX or plain, with a name before "=" and a unit behind.
    """
    if len(text) > LONGEST_ANSWER:
        return None
    if text.isascii() and text.removeprefix("-").isdecimal():
        return Fraction(int(text))
    sides = _plain(text).split("=")
    for chosen in (len(sides) - 1, 0):
        number = _number(sides[chosen].strip(" _'\"").rstrip(".,;:! "))
        if number is not None:
            others = (side for i, side in enumerate(sides) if i != chosen)
            return None if any(_SEVERAL.search(side) for side in others) else number
    return None


def _plain(text: str) -> str:
    """`text` without markup: blanks where markup could hold two numbers apart."""
    text = text.translate(_CHARACTERS)
    text = _THIN_THOUSANDS.sub(",", text)
    text = _DROPPED.sub("", text)
    text = _FRACTION_NAME.sub(r"\\frac", text)
    for _ in range(4):
        unwrapped = _WRAPPER.sub(_unwrap, text)
        if unwrapped == text:
            break
        text = unwrapped
    text = _FRACTION_SHORT.sub(r"\\frac{\1}{\2}", text)
    text = _BLANK.sub(" ", text).strip()
    return text[1:-1] if re.fullmatch(r"\{[^{}]*\}", text) else text


def _unwrap(wrapper: re.Match[str]) -> str:
    r"""Content of \text{...}; a unit goes away (\text{cm}^2), numbers and joining words stay."""
    content, exponent = wrapper.group(1), wrapper.group(2) or ""
    words = content.split()
    is_unit = "".join(words).isalpha() and _NOT_UNITS.isdisjoint(words)
    if is_unit and all(len(word) > 1 or word in _SHORT_UNITS for word in words):
        return " "
    return f" {content} {exponent}"


def _number(text: str) -> Fraction | None:
    if match := _DECIMAL.fullmatch(text):
        if match["unit"] and not _NOT_UNITS.isdisjoint(match["unit"].lower().split()):
            return None
        value = Fraction(match["value"].replace(",", "").rstrip("."))
    elif match := _QUOTIENT.fullmatch(text):
        top, low = (match["top"], match["low"]) if match["top"] else (match["over"], match["under"])
        if int(low.replace(",", "")) == 0:
            return None
        value = Fraction(int(top.replace(",", "")), int(low.replace(",", "")))
        value = -value if match["inner"] == "-" else value
    elif match := _POWER.fullmatch(text):
        base, exponent = int(match["base"].replace(",", "")), int(match["long"] or match["short"])
        if base.bit_length() * exponent > 4096:
            return None
        value = Fraction(base**exponent)
    else:
        return None
    return -value if match["sign"] == "-" else value


def _canonical(text: str) -> str:
    """Normal spelling of an answer that is not a number."""
    plain = _ROOT_SHORT.sub(r"\\sqrt{\1}", _plain(text)).split("=")[-1]
    return "".join(_APART.sub("|", plain).split()).rstrip(".")
