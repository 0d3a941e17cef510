"""Random states of one rank: torch on CPU and GPU, Megatron's tracker, numpy, Python."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy
import torch

from megatron_dapo import device

device.install_cpu_support()

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402

RANDOM = "random"
"""Folder in a checkpoint."""


def random_file(rank: int) -> str:
    """Name in a checkpoint of the random states of global rank `rank`."""
    return f"{RANDOM}/rank_{rank:05d}.pt"


def dump_random_states() -> bytes:
    """This process's random states as they are now."""
    twister = numpy.random.get_state(legacy=False)
    words = torch.from_numpy(numpy.array(twister["state"]["key"]))
    version, integers, next_gauss = random.getstate()
    states: dict[str, object] = {
        "cpu": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
        "numpy": [
            words,
            twister["state"]["pos"],
            twister["has_gauss"],
            twister["gauss"],
        ],
        "python": [version, list(integers), next_gauss],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return buffer.getvalue()


def restore_random_states(path: Path) -> None:
    """Put this process's random states back."""
    states = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    words, position, has_gauss, gauss = states["numpy"]
    numpy.random.set_state(("MT19937", words.numpy(), position, has_gauss, gauss))
    version, integers, next_gauss = states["python"]
    random.setstate((version, tuple(integers), next_gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
