"""Reward functions that the tests of plug-ins name."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping

from megatron_dapo.reward.plugin import RewardMeta


def echo(prompt: str, response: str, answer: str, meta: RewardMeta) -> float:
    return float(response)


def parts(prompt: str, response: str, answer: str, meta: RewardMeta) -> Mapping[str, float]:
    return {"accuracy": float(response == answer), "form": 0.25, "brief": -0.5}


def only_accuracy(prompt: str, response: str, answer: str, meta: RewardMeta) -> dict[str, float]:
    return {"accuracy": float(response == answer)}


def half_right(prompt: str, response: str, answer: str, meta: RewardMeta) -> dict[str, float]:
    return {"accuracy": 0.5}


def describe(prompt: str, response: str, answer: str, meta: RewardMeta) -> float:
    assert (prompt, response, answer) == ("p text", "r text", "7")
    assert meta == RewardMeta("p1", "unit", 3, 2, 10, "stop")
    return 1.0


def fail_for_some(prompt: str, response: str, answer: str, meta: RewardMeta) -> float:
    """Sample 0 raises, 1 asks for too much memory, 2 kills its process, the others are right."""
    if meta.sample_index == 0:
        raise ArithmeticError("cannot grade this")
    if meta.sample_index == 1:
        bytearray(100 << 30)
    if meta.sample_index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def too_few(prompt: str) -> float:
    return 0.0


async def later(prompt: str, response: str, answer: str, meta: RewardMeta) -> float:
    return 0.0


number = 3


def named(prompt: str, response: str, answer: str, meta: RewardMeta) -> dict[str, float]:
    """Whatever the response holds as JSON."""
    found: dict[str, float] = json.loads(response)
    return found
