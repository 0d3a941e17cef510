from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.reward.math_answer import extract_answer, parse_number, verify_answer
from tests.unit.handed import Case, handed_cases

STYLES = ("answer_line", "boxed", "either", "dapo_reference")


@pytest.mark.parametrize("case", handed_cases("e", "verify_answer"))
def test_handed_answer(case: Case) -> None:
    given_ = case["input"]
    call = (verify_answer, given_["response"], given_["truth"])
    started = time.monotonic()
    if given_.get("from_worker_thread"):
        with ThreadPoolExecutor(1) as pool:
            check = pool.submit(*call, style=given_["style"]).result()
    else:
        check = verify_answer(*call[1:], style=given_["style"])
    assert check.correct is case["expect"]["correct"], check
    assert time.monotonic() - started < given_["budget_s"]


# The table of algorithms, section 8: (response, ground truth, truth T, published grader D).
TABLE = {
    2: (r"Answer: \boxed{540}", "540", True, True),
    3: (r"The result is \boxed{540}.", "540", True, False),
    4: ("Answer: 045", "45", True, False),
    5: ("Answer: 45", "045", True, False),
    6: ("Answer: 1,024", "1024", True, True),
    7: ("Answer: 1{,}024", "1024", True, True),
    8: ("Answer: 540.", "540", True, False),
    9: ("Answer: $540.$", "540", True, True),
    10: ("Answer: 540.0", "540", True, False),
    11: ("Answer: x = 540", "540", True, True),
    12: ("Answer: 540 = n", "540", True, False),
    13: ("Answer: 12\nNo, wait.\nAnswer: 540", "540", True, True),
    14: ("Answer: 540\nNo, wait.\nAnswer: 12", "540", False, False),
    15: ("Answer: 540\n" + "Let me explain. " * 25, "540", True, False),
    16: ("Final answer: 540", "540", True, True),
    17: ("**Answer:** 540", "540", True, False),
    18: ("**Answer: 540**", "540", True, False),
    19: ("Answer:\n540", "540", True, True),
    20: ("Answer:\n$$\n540\n$$", "540", True, False),
    22: ("Answer: 540 degrees", "540", True, True),
    25: ("Answer: 540 apples", "540", True, False),
    26: (r"Answer: \text{540}", "540", True, True),
    28: (r"Answer: \frac{1080}{2}", "540", True, False),
    29: ("Answer: 540 or 12", "540", False, False),
    31: ("Answer: $Answer", "540", False, False),
    33: ("<think>Answer: 540</think> I am not sure", "540", False, False),
    34: ("Answer: 540<|im_end|>", "540", True, False),
    35: ("Answer: ５４０", "540", True, False),
    38: ("Answer: 5 4 0", "540", False, True),
    42: (r"Answer: 3\sqrt2", r"3\sqrt{2}", True, True),
    45: ("Answer: 2^{10}", "1024", True, False),
}


@pytest.mark.parametrize(("response", "truth", "right", "_"), TABLE.values(), ids=TABLE)
def test_the_integer_grader_agrees_with_the_truth(
    response: str, truth: str, right: bool, _: bool
) -> None:
    assert verify_answer(response, truth, style="either").correct is right


@pytest.mark.parametrize(("response", "truth", "_", "right"), TABLE.values(), ids=TABLE)
def test_dapo_reference_agrees_with_the_published_grader(
    response: str, truth: str, _: bool, right: bool
) -> None:
    assert verify_answer(response, truth, style="dapo_reference").correct is right


@pytest.mark.parametrize(
    ("response", "predicted"),
    [
        ("no line", None),
        (r"Answer: $\frac12$ of it", r"\frac{1}{2}"),
        (r"Answer: \sqrt5", r"\sqrt{5}"),
        (r"Answer: \mbox{7 cm}", "7"),
        ("Answer: 12,13", "1213"),
        (r"Answer: \$5", "5"),
        (r"Answer: 60^{\circ}", "60"),
        ("Answer: an apple a day", "appleday"),
        ("Answer: 5\\text{ and }6", "56"),
        ("Answer: y=a,b=7", "7"),
        (r"Answer: \textbf{(A)}\ 3", "(A)3"),
        ("ANSWER  :\n\n 8 \nrest", "8"),
        ("Answer: " + "9" * 400, None),
    ],
)
def test_dapo_reference_normalises_as_specified(response: str, predicted: str | None) -> None:
    assert verify_answer(response, "0", style="dapo_reference").extracted == predicted


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("34", 34),
        ("-34", -34),
        ("- $34$", -34),
        ("+5", 5),
        ("-0", 0),
        ("٣٤", None),
        ("5²", None),
        ("34.50", Fraction(69, 2)),
        (".5", Fraction(1, 2)),
        ("1,234,567", 1234567),
        (r"1\,234", 1234),
        (r"1,\!234", 1234),
        ("12,13", None),
        ("1234,567", None),
        ("1, 234", None),
        ("3*4", None),
        ("3**4", None),
        ("**34**", 34),
        ("34 cm", 34),
        (r"34\text{ cm}^2", 34),
        (r"34\text{m}^{2}", 34),
        (r"34\mathrm{i}", None),
        (r"34\text{ or }35", None),
        (r"34\text{ or }", None),
        (r"\text{34}^2", 1156),
        ("34 cm^2", 34),
        ("34x", None),
        ("34 x", None),
        (r"34\pi", None),
        ("34 pi", None),
        ("5 million", None),
        ("about 34", None),
        ("34 or more", None),
        (r"\frac{6}{4}", Fraction(3, 2)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"-\frac{-3}{4}", Fraction(3, 4)),
        (r"\frac12", Fraction(1, 2)),
        ("1/2", Fraction(1, 2)),
        ("1/0", None),
        (r"\frac{1}{0}", None),
        ("2^{10}", 1024),
        ("2^3", 8),
        ("-2^2", -4),
        ("2^{9999}", None),
        ("2^{2^2}", None),
        ("x = 34", 34),
        ("34 = x", 34),
        ("x = 3, y = 5", None),
        ("x = 3 or x = 5", None),
        ("1,080/2 = 540", 540),
        (r"\boxed{34}", 34),
        (r"\boxed{\text{34}}", 34),
        ("{34}", 34),
        ("101_2", None),
        ("1e3", None),
        ("", None),
        ("9" * 600, None),
        ("22099999999999998951424", 22099999999999998951424),
    ],
)
def test_numbers_are_read_exactly(text: str, number: int | Fraction | None) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("response", "style", "extracted"),
    [
        ("Answer: 5\nSo \\boxed{7}", "either", "7"),
        ("So \\boxed{7}\nAnswer: 5", "either", "5"),
        ("So \\boxed{7}\nAnswer: 5", "boxed", "7"),
        ("So \\boxed{7}\nAnswer:", "either", "7"),
        ("So \\boxed{7}", "answer_line", None),
        ("\\boxed{5} then \\boxed{7", "boxed", "5"),
        ("\\boxed{\\{1,2\\}}", "boxed", "\\{1,2\\}"),
        ("\\boxed{\\boxed{5}}", "boxed", "\\boxed{5}"),
        ("\\boxed{ x \\boxed{5}", "boxed", "5"),
        ("} { \\boxed{5} {", "boxed", "5"),
        ("\\fbox{5}", "boxed", "5"),
        ("Answer: 1</think>done", "answer_line", None),
        ("Answer: \\[\n5\n\\] done", "answer_line", "\\[\n5\n\\]"),
    ],
)
def test_the_last_answer_is_extracted_once(response: str, style: str, extracted: str) -> None:
    assert extract_answer(response, style) == extracted  # type: ignore[arg-type]


def test_the_reason_says_what_went_wrong() -> None:
    assert verify_answer("Answer: 5", "5").reason == "equal"
    assert verify_answer("Answer: 6", "5").reason == "different"
    assert verify_answer("Answer: five", "5").reason == "unreadable"
    assert verify_answer("five", "5").reason == "not_found"
    assert verify_answer("five", "5", style="dapo_reference").reason == "not_found"


@settings(deadline=None)
@given(st.integers(-(10**30), 10**30), st.sampled_from(STYLES))
def test_a_plainly_written_integer_is_right_and_its_neighbour_wrong(
    number: int, style: str
) -> None:
    response = f"work\nAnswer: \\boxed{{{number}}}"
    assert verify_answer(response, number, style=style).correct  # type: ignore[arg-type]
    assert not verify_answer(response, number + 1, style=style).correct  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 5), st.booleans())
def test_spelling_does_not_change_a_number(number: int, zeros: int, commas: bool) -> None:
    digits = f"{abs(number):,}" if commas else f"{'0' * zeros}{abs(number)}"
    sign = "-" if number < 0 else ""
    assert verify_answer(f"Answer: ${sign}{digits}.0$ apples", str(number)).correct


FRAGMENTS = st.sampled_from(
    [
        *("Answer:", "answer", "\\boxed{", "\\text{", "\\frac", "\\[", "\\", "{", "}", "$", "**"),
        *(
            "^",
            "=",
            "-",
            ",",
            "5",
            "9" * 50,
            "a",
            "\n",
            " " * 40,
            "\ud800",
            "\x00",
            "٣",
            "</think>",
        ),
    ]
)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(FRAGMENTS, max_size=60).map("".join) | st.text(max_size=200),
    st.lists(FRAGMENTS, max_size=4).map("".join) | st.integers(),
    st.sampled_from(STYLES),
)
def test_no_text_makes_the_grader_raise(response: str, truth: str | int, style: str) -> None:
    check = verify_answer(response, truth, style=style)  # type: ignore[arg-type]
    assert check == verify_answer(response, truth, style=style)  # type: ignore[arg-type]
    assert not check.correct or check.extracted is not None


HOSTILE = {
    "boxes": "\\boxed{" * 200_000,
    "braces": "\\boxed{" + "{" * 1_000_000,
    "labels": "answer" * 150_000,
    "blanks": "Answer" + " " * 1_000_000 + ":",
    "digits": "Answer: " + "9" * 1_000_000,
    "commas": "Answer: " + "1,234" * 800,
    "dollars": "Answer: " + "$" * 4000,
    "texts": "Answer: " + "\\text{" * 80 + "5" + "}" * 80,
    "tower": "Answer: 9^{9^{9^{9^{9}}}}",
    "equals": "Answer: " + "=" * 4000,
    "units": "Answer: 5 " + "a b" * 160 + "!",
}


LONGEST_SECONDS = 20.0
"""All take a hundredth of a second, and would take hours where the time for a long text grew with
the square of its length, or that for a nested one exponentially."""


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_grader_hangs_on_hostile_text(text: str, style: str) -> None:
    started = time.monotonic()
    assert not verify_answer(text, "7", style=style).correct  # type: ignore[arg-type]
    assert time.monotonic() - started < LONGEST_SECONDS


PIECES = ("answer", "Answer", ":", "ANSWER:", "**", " ", "\\boxed{", "}", "{", "7", "\n", "\uff1a")


@given(st.lists(st.sampled_from(PIECES), max_size=30))
@settings(max_examples=300, deadline=None)
def test_the_last_label_is_the_same_from_behind(pieces: list[str]) -> None:
    text = "".join(pieces)
    behind = text + "\u00e9"  # what is not ASCII is searched from the front
    found, same = (extract_answer(t, "answer_line") for t in (text + "e", behind))
    assert (found or "").removesuffix("e") == (same or "").removesuffix("\u00e9")


def test_many_threads_grade_at_once() -> None:
    def grade(number: int) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        return verify_answer(f"Answer: {number}", number).correct

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(grade, range(2000)))


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("31/2", "3 1/2", False),
        ("3 1/2", "3 1/2", True),
        ("$3\\ 1/2$", "3 1/2", True),
        ("12", "1 2", False),
        ("1000000", "1 000 000", True),
        ("x^2 + 1", "x^2+1", True),
    ],
)
def test_blanks_hold_numbers_apart_unless_they_mark_thousands(
    answer: str, truth: str, right: bool
) -> None:
    assert verify_answer(f"Answer: {answer}", truth).correct is right
