"""The seed of each sample: distinct for all of a run, the same on a second run."""

from __future__ import annotations

import hashlib
from typing import Literal

Purpose = Literal["train", "evaluate", "probe"]


def sample_seed(
    run_seed: int,
    step: int,
    event: int | str,
    sample: int,
    *,
    purpose: Purpose = "train",
    piece: int = 0,
) -> int:
    """Seed of one response, 0 .. 2**63 - 1.

    It depends on nothing but its arguments, above all not on the replica that samples, so two
    replicas never draw the same stream and a lost request can move to another one.

    Args:
        step: rollout step, from 1.
        event: index of the sampling event (one prompt, drawn once) inside the step; of an
            evaluation, set and index of the prompt in it.
        sample: index of the response inside its group.
        piece: how often the response was interrupted before this part of it: what is sampled on
            must not draw the numbers of its beginning again.
    """
    words = f"{purpose} {run_seed} {step} {event} {sample}"
    if piece:
        words += f" {piece}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()) >> 1
