"""Reward of the example: the last number of a response is its answer.

A model this small seldom keeps to an answer format; that is not what the example is about.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megatron_dapo.reward.plugin import RewardMeta

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_LONGEST_DIGITS = 30


def last_number(prompt: str, response: str, answer: str, meta: RewardMeta) -> float:
    """1.0 where the last number in `response` equals `answer`, else 0.0."""
    found = _NUMBER.findall(response.replace(",", ""))
    if not found or len(found[-1]) > _LONGEST_DIGITS:
        return 0.0
    return float(Fraction(found[-1]) == Fraction(answer))
