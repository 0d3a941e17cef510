"""What a language model is told when it rewrites a problem so that its answer is an integer."""

from __future__ import annotations

from megatron_dapo.data.integer_form import IntegerForm
from megatron_dapo.data.rewrite_check import SECTIONS, RewriteError
from megatron_dapo.data.tokenizer import Message

THOUGHT, FORMAT, PROBLEM, CALCULATION, FINAL = SECTIONS

SYSTEM = f"""You rewrite mathematics problems so that their answer becomes one integer.

You are given a problem, its answer, and the form in which the answer is to be asked for: an \
expression with letters that stand for positive integers. Keep the problem as it is, with every \
number and name in it. Only change its question: say that the answer can be written in the given \
form, say what the letters are, and ask for their sum. Do not solve the problem, and do not say \
what the letters are equal to.

Reply with these five headings and nothing else:

## {THOUGHT}
What form the answer has, and which sentence has to change.
## {FORMAT}
The form.
## {PROBLEM}
The whole rewritten problem.
## {CALCULATION}
The value of each letter as letter = integer, and their sum.
## {FINAL}
The sum, as digits."""

_EXAMPLE_1 = r"""Problem:
A square has a side of length $\sqrt{6}-1$. What is its area, increased by 4?

Answer: 11-2\sqrt{6}

Form: m-n\sqrt{k}
Say that: m, n and k are positive integers; k is not divisible by the square of any prime
Ask for: m+n+k"""

_REPLY_1 = f"""## {THOUGHT}
The answer is an integer minus an integer times a square root. Only the question changes.
## {FORMAT}
m-n\\sqrt{{k}}
## {PROBLEM}
A square has a side of length $\\sqrt{{6}}-1$. Its area, increased by 4, can be written in the \
form $m-n\\sqrt{{k}}$, where $m$, $n$ and $k$ are positive integers and $k$ is not divisible by \
the square of any prime. Find $m+n+k$.
## {CALCULATION}
$11-2\\sqrt{{6}}$ gives m = 11, n = 2, k = 6, and 11 + 2 + 6 = 19.
## {FINAL}
19"""

_EXAMPLE_2 = """Problem:
Two fair dice are rolled. What is the probability that the sum of the numbers is 7?

Answer: \\frac{1}{6}

Form: \\frac{m}{n}
Say that: m and n are positive integers; m and n are relatively prime
Ask for: m+n"""

_REPLY_2 = f"""## {THOUGHT}
The answer is a fraction in lowest terms. The question becomes a statement about it.
## {FORMAT}
\\frac{{m}}{{n}}
## {PROBLEM}
Two fair dice are rolled. The probability that the sum of the numbers is 7 can be written as \
$\\frac{{m}}{{n}}$, where $m$ and $n$ are relatively prime positive integers. Find $m+n$.
## {CALCULATION}
$\\frac{{1}}{{6}}$ gives m = 1, n = 6, and 1 + 6 = 7.
## {FINAL}
7"""


def rewrite_messages(problem: str, answer: str, form: IntegerForm) -> list[Message]:
    """The conversation that asks for one rewritten problem."""
    return [
        {"role": "system", "content": SYSTEM},
        *(
            {"role": role, "content": text}
            for example in examples()
            for role, text in zip(("user", "assistant"), example, strict=True)
        ),
        {"role": "user", "content": _request(problem, answer, form)},
    ]


def examples() -> list[tuple[str, str]]:
    """(request, reply) of the worked examples."""
    return [(_EXAMPLE_1, _REPLY_1), (_EXAMPLE_2, _REPLY_2)]


def correction(reply: str, error: RewriteError) -> list[Message]:
    """Two turns more: what was wrong with a reply."""
    complaint = (
        f"That cannot be used ({error}). Reply again with all five headings, in the form given."
    )
    return [{"role": "assistant", "content": reply}, {"role": "user", "content": complaint}]


def _request(problem: str, answer: str, form: IntegerForm) -> str:
    return f"""Problem:
{problem}

Answer: {answer}

Form: {form.template}
Say that: {"; ".join(_sentences(form))}
Ask for: {form.question}"""


def _sentences(form: IntegerForm) -> list[str]:
    names = _listing(form.letters)
    several = len(form.letters) > 1
    found = [f"{names} are positive integers" if several else f"{names} is a positive integer"]
    for condition in form.conditions:
        if condition == "coprime" and len(form.letters) == 2:
            found.append(f"{names} are relatively prime")
        elif condition == "coprime":
            found.append("the fraction is in lowest terms")
        else:
            roots = [x for x in form.letters if f"\\sqrt{{{x}}}" in form.template]
            verb = "are" if len(roots) > 1 else "is"
            found.append(f"{_listing(roots)} {verb} not divisible by the square of any prime")
    return found


def _listing(letters: tuple[str, ...] | list[str]) -> str:
    return letters[0] if len(letters) == 1 else f"{', '.join(letters[:-1])} and {letters[-1]}"
