"""A reward module whose import raises."""

from __future__ import annotations

RATIO = 1 / 0


def grade(prompt: str, response: str, answer: str, meta: object) -> float:
    return RATIO
