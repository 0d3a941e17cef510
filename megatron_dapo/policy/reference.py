"""The reference policy of a KL penalty: the start weights, kept aside and swapped in to score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FrozenWeights:
    """CPU copy of this rank's weights; costs no device memory while the policy trains."""

    chunks: Sequence[nn.Module]
    weights: list[Tensor]

    @classmethod
    def of(cls, chunks: Sequence[nn.Module]) -> Self:
        """The weights that `chunks` hold now."""
        return cls(chunks, _copy(chunks))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the chunks hold the frozen weights; afterwards their own are back, bitwise."""
        trained = _copy(self.chunks)
        _write(self.chunks, self.weights)
        try:
            yield
        finally:
            _write(self.chunks, trained)


def _parameters(chunks: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for chunk in chunks for parameter in chunk.parameters()]


def _copy(chunks: Sequence[nn.Module]) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in _parameters(chunks)]


@torch.no_grad()
def _write(chunks: Sequence[nn.Module], weights: Sequence[Tensor]) -> None:
    for parameter, weight in zip(_parameters(chunks), weights, strict=True):
        parameter.copy_(weight)
