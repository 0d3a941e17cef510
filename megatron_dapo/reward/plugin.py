"""Rewards of the user's own: a function named in the configuration."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:  # it imports torch, which a worker that calls a reward function does without
    from megatron_dapo.types import FinishReason


@dataclass(frozen=True, slots=True)
class RewardMeta:
    """What a reward function may want to know beside the texts."""

    prompt_id: str
    source: str
    sample_index: int
    response_tokens: int
    max_response_tokens: int
    finish_reason: FinishReason


class RewardFunction(Protocol):
    """`function(prompt, response, answer, meta)`.

    Returns the score as a number, or named parts: their sum is the score, and each is logged.
    The name "accuracy" is not a part: it says how right the answer is (1 right, 0 wrong) and is
    what dynamic sampling filters on. Without it an answer is right when its score reaches
    `reward.correct`; with nothing else the score is `reward.correct` or `reward.incorrect`.
    See `check_parts` for what is refused.
    """

    def __call__(
        self, prompt: str, response: str, answer: str, meta: RewardMeta
    ) -> float | Mapping[str, float]: ...


RESERVED_PARTS = ("acc", "overlong")
"""Parts are logged as reward/NAME/mean; these are there already."""


def check_parts(values: Mapping[str, float]) -> None:
    """Refuse what would be taken for something else.

    Args:
        values: what a reward function returned, by name; finite.

    Raises:
        ValueError: an accuracy that is no share, or a part that has the name of another metric.
    """
    if not 0 <= values.get("accuracy", 0.0) <= 1:
        raise ValueError(
            f"accuracy={values['accuracy']:g} of a reward function: must lie between 0, wrong, and "
            "1, right. Give a reward under another name"
        )
    if taken := [name for name in RESERVED_PARTS if name in values]:
        raise ValueError(
            f"a reward function returned a part {taken[0]!r}, but reward/{taken[0]}/mean is a "
            "metric of ours. The share that is right is called 'accuracy'; else choose another name"
        )


def load_plugin(path: str) -> RewardFunction:
    """The function at `dotted.path:function`, checked but not called.

    Raises:
        ValueError: bad form, no such module or function, or it does not take four arguments.
    """
    module_name, colon, name = path.partition(":")
    parts = module_name.split(".")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in parts):
        raise ValueError(f"reward.plugin={path!r} must read dotted.path:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"reward.plugin={path!r}: cannot import {module_name} ({error}); its folder must be "
            "on PYTHONPATH"
        ) from error
    if name not in vars(module):
        raise ValueError(f"reward.plugin={path!r}: {module_name} has no {name}")
    function = vars(module)[name]
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"reward.plugin={path!r}: {name} must be a plain function")
    try:
        inspect.signature(function).bind("prompt", "response", "answer", "meta")
    except TypeError as error:
        raise ValueError(
            f"reward.plugin={path!r}: {name} must take (prompt, response, answer, meta), {error}"
        ) from error
    return cast(RewardFunction, function)
