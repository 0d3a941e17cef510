"""Which collectives of torch.distributed a piece of code calls on this rank, in order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
)


class Call(NamedTuple):
    """One collective."""

    name: str
    shape: tuple[int, ...]
    """Of the smallest tensor among its arguments: what one rank hands in, or gets."""
    group: dist.ProcessGroup | None


@contextmanager
def recorded_collectives() -> Iterator[list[Call]]:
    """Inside, every collective of this rank is added to the list."""
    calls: list[Call] = []

    def recorder(name: str, original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            given = [*args, *kwargs.values()]
            tensors = sorted((x for x in given if isinstance(x, Tensor)), key=Tensor.numel)
            groups = [x for x in given if isinstance(x, dist.ProcessGroup)]
            shape = tuple(tensors[0].shape) if tensors else ()
            calls.append(Call(name, shape, groups[0] if groups else None))
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, recorder(name, getattr(dist, name))))
        yield calls
