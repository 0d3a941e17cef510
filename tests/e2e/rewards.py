"""A reward for random text: about half of the responses are right, so groups are mixed."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_dapo.reward.plugin import RewardMeta

GRADED_FILE = "MEGATRON_DAPO_TEST_GRADED"
"""Environment variable with a file that gets one byte for every graded response."""


def even_ending(_prompt: str, response: str, _answer: str, _meta: RewardMeta) -> float:
    """1 for a response whose last word has an even number, else -1."""
    if GRADED_FILE in os.environ:
        with Path(os.environ[GRADED_FILE]).open("ab") as file:
            file.write(b".")
    words = response.split()
    return 1.0 if words and int(words[-1].removeprefix("w")) % 2 == 0 else -1.0
