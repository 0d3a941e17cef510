"""The text that a model sees of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megatron_dapo.data.tokenizer import Message, Tokenizer

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo_prompt(problem: str) -> str:
    """`problem` inside DAPO's instruction, once: text that already carries it stays as it is."""
    return f"{DAPO_PREFIX}{bare_problem(problem)}{DAPO_SUFFIX}"


def bare_problem(text: str) -> str:
    """`text` without DAPO's instruction around it."""
    return text.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX)


def format_prompt(
    messages: Sequence[Message], style: Literal["dapo", "chat", "plain"], tokenizer: Tokenizer
) -> str:
    """Text of a conversation under `data.prompt_format`.

    Raises:
        ValueError: dapo or plain with anything but one user message; chat without a template.
    """
    if style == "chat":
        return tokenizer.apply_chat_template(messages)
    if len(messages) != 1 or messages[0]["role"] != "user":
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"data.prompt_format={style} takes one user message, this prompt has ({roles}); "
            "conversations need prompt_format=chat"
        )
    text = messages[0]["content"]
    return dapo_prompt(text) if style == "dapo" else text
