"""Variants that take turns, and what is known of each afterwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Series", "WrongBytes", "interleave"]


class WrongBytes(Exception):
    """What was read is not what was written: no number means anything."""


@dataclass(frozen=True)
class Series:
    """The times of one thing that moves bytes."""

    name: str
    bytes: int
    seconds: tuple[float, ...]
    """One of each round."""

    @property
    def rate(self) -> float:
        """GB/s, by the median of the times."""
        return self.bytes / statistics.median(self.seconds) / 1e9

    @property
    def slowest(self) -> float:
        """GB/s."""
        return self.bytes / max(self.seconds) / 1e9

    @property
    def fastest(self) -> float:
        """GB/s."""
        return self.bytes / min(self.seconds) / 1e9

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.bytes,
            "seconds": list(self.seconds),
            "gigabytes_per_second": {
                "median": self.rate,
                "slowest": self.slowest,
                "fastest": self.fastest,
            },
        }


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    size: int,
    rounds: int,
    on_step: Callable[[str], None],
    before: Callable[[], None] = lambda: None,
) -> list[Series]:
    """Run each variant once to warm up, and then once in each round, in an order that rotates.

    Args:
        variants: by name.
        size: bytes that a variant moves.
        on_step: called with the name of what runs next.
        before: called before each run, outside of its time.
    """
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            on_step(f"{name}, {'warming up' if number == 0 else f'{number} of {rounds}'}")
            before()
            start = time.perf_counter()
            variants[name]()
            passed = time.perf_counter() - start
            if number > 0:
                times[name].append(passed)
    return [Series(name, size, tuple(times[name])) for name in names]
