"""Typed metrics: sums and counts travel, means are formed once (never a mean of means).

A `MetricBag` collects what one rank saw. `reduce_bags` merges the bags of a group in one
collective and gives every rank the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Kind = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured quantity. mean: `value` is a sum over `count` things."""

    kind: Kind
    value: Tensor | float
    count: Tensor | float = 1.0


def mean(total: Tensor | float, count: Tensor | float) -> Metric:
    """Mean of `count` things that add up to `total`; nothing counted reads as absent."""
    return Metric("mean", total, count)


def total(value: Tensor | float) -> Metric:
    """Something that adds up over ranks and micro-batches."""
    return Metric("sum", value)


def maximum(value: Tensor | float) -> Metric:
    """The largest of what was observed."""
    return Metric("max", value)


def minimum(value: Tensor | float) -> Metric:
    """The smallest of what was observed."""
    return Metric("min", value)


def merge(a: Metric, b: Metric) -> Metric:
    """What one metric over both sets of observations would be."""
    if a.kind != b.kind:
        raise RuntimeError(f"cannot merge a {a.kind} metric with a {b.kind} metric of one name")
    if a.kind in ("mean", "sum"):
        return Metric(a.kind, a.value + b.value, a.count + b.count)
    pick = torch.maximum if a.kind == "max" else torch.minimum
    value = pick(*(torch.as_tensor(m.value, dtype=torch.float64) for m in (a, b)))
    return Metric(a.kind, value, a.count + b.count)


@dataclass
class MetricBag:
    """Metrics of one rank by name; adding a name again merges."""

    metrics: dict[str, Metric] = field(default_factory=dict)

    def add(self, name: str, metric: Metric) -> None:
        known = self.metrics.get(name)
        self.metrics[name] = metric if known is None else merge(known, metric)

    def update(self, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            self.add(name, metric)

    def values(self) -> dict[str, float]:
        """Finished numbers by name; a mean or an extreme of nothing is left out."""
        out: dict[str, float] = {}
        for name, metric in self.metrics.items():
            if metric.kind == "sum":
                out[name] = float(metric.value)
            elif float(metric.count) > 0:
                divisor = float(metric.count) if metric.kind == "mean" else 1.0
                out[name] = float(metric.value) / divisor
        return out


def reduce_bags(
    bag: MetricBag, names: Mapping[str, Kind], group: dist.ProcessGroup | None
) -> MetricBag:
    """The bag of all ranks of `group`, on every rank.

    Args:
        bag: this rank's metrics; empty on a rank that saw nothing (an early pipeline stage).
        names: name -> kind of everything that any rank may hold, the same on every rank.
        group: every rank of it must call; None means this rank alone.

    Communicates: one all-gather of 3 float64 numbers per name.
    """
    unknown = sorted(set(bag.metrics) - set(names))
    if unknown:
        raise RuntimeError(f"metrics {unknown} are not declared in {sorted(names)}")
    if group is None or dist.get_world_size(group) == 1:
        return bag
    ordered = sorted(names)
    packed = torch.zeros(len(ordered), 3, dtype=torch.float64)
    for row, name in enumerate(ordered):
        metric = bag.metrics.get(name)
        if metric is not None:
            numbers = [1.0, float(metric.value), float(metric.count)]
            packed[row] = torch.tensor(numbers, dtype=torch.float64)
    gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, packed, group=group)
    merged = MetricBag()
    for part in gathered:
        _absorb(merged, ordered, names, part.tolist())
    return merged


def _absorb(
    bag: MetricBag, ordered: list[str], names: Mapping[str, Kind], rows: Iterable[list[float]]
) -> None:
    for name, (present, value, count) in zip(ordered, rows, strict=True):
        if present:
            bag.add(name, Metric(names[name], value, count))
