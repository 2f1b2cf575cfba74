"""Minimum, maximum, mean, standard deviation, NaNs and infinities of saved tensors, in memory that
does not grow with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pyckpt.engine import Engine
from pyckpt.tools.contents import Contents
from pyckpt.tools.numbers import in_parts, numbers
from pyckpt.tools.streams import ELSEWHERE, Streams, why_opaque
from pyckpt.tools.values import value
from pyckpt.train.store.pieces import Direct

__all__ = ["Statistics", "statistics"]


@dataclass(frozen=True)
class Statistics:
    """Of a tensor's elements; of complex ones, of their absolute values."""

    count: int
    """How many elements there are. Of a tensor of which one rank saved a part for itself, these and
    what follows are of that part."""
    nan: int
    inf: int
    """How many are infinite, of either sign."""
    min: float | None
    """This and what follows is of the finite elements; None without any."""
    max: float | None
    mean: float | None
    std: float | None
    """The root of their mean squared distance from the mean."""


def statistics(
    contents: Contents,
    keys: Sequence[str],
    *,
    direct: Direct = "auto",
    engine: Engine | None = None,
) -> Iterator[tuple[str, Statistics | str]]:
    """Read tensors of a checkpoint, in the order of its files, and compare their checksums.

    Yields each key with its statistics; or with the reason why it has none, as text: the value is
    damaged, or no plain tensor, or other nodes have it.

    Raises:
        OSError: this process has no memory or descriptors left.
    """
    plain = []
    for key in keys:
        saved = value(contents.metadata, key)
        reason = why_opaque(saved)
        if not contents.is_here(saved.parts):
            reason = reason or ELSEWHERE
        if reason:
            yield key, reason
        else:
            plain.append(key)
    streams = Streams([contents], direct=direct, engine=engine)
    sums = _Sums()
    current: str | None = None
    failure = ""
    for key, event in streams.read(streams.in_order(plain)):
        if event is None:
            if current is not None and current != key:
                yield current, failure or sums.result()
            current, sums, failure = key, _Sums(), ""
        elif isinstance(event, Exception):
            failure = str(event) or type(event).__name__
        elif not failure:
            (elements,) = event
            try:
                sums.add(elements)
            except TypeError as error:
                failure = str(error)
    if current is not None:
        yield current, failure or sums.result()


class _Sums:
    def __init__(self) -> None:
        self._count = self._nan = self._inf = self._finite = 0
        self._min: float | int = math.inf
        self._max: float | int = -math.inf
        self._mean = self._squares = 0.0

    def add(self, elements: torch.Tensor) -> None:
        """Raises TypeError for elements that are no numbers."""
        for (part,) in in_parts(elements):
            values = numbers(part)
            self._count += values.numel()
            if not values.is_floating_point():
                self._add_finite(values)
                continue
            finite = values.isfinite()
            count = int(finite.sum())
            if count != values.numel():
                nan = int(values.isnan().sum())
                self._nan += nan
                self._inf += values.numel() - count - nan
                values = values[finite]
            self._add_finite(values)

    def _add_finite(self, values: torch.Tensor) -> None:
        count = values.numel()
        if not count:
            return
        least, most = values.aminmax()
        self._min, self._max = min(self._min, least.item()), max(self._max, most.item())
        # Chan, Golub and LeVeque: the sums of a part are added without cancellation.
        values = values.to(torch.float64)
        mean = float(values.mean())
        squares = float((values - mean).square_().sum())
        total = self._finite + count
        delta = mean - self._mean
        self._squares += squares + delta * delta * self._finite * count / total
        self._mean += delta * count / total
        self._finite = total

    def result(self) -> Statistics:
        if not self._finite:
            return Statistics(self._count, self._nan, self._inf, None, None, None, None)
        std = math.sqrt(self._squares / self._finite)
        return Statistics(self._count, self._nan, self._inf, self._min, self._max, self._mean, std)
