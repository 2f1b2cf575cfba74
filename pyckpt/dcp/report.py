"""`LoadReport`: the outcome of a load, key by key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pyckpt.printable import printable, seconds_text, size_text

__all__ = ["Conversion", "Difference", "LoadReport", "Replacement"]

_NAMES_SHOWN = 3


class Conversion(NamedTuple):
    """A tensor that was saved in one dtype and loaded into another."""

    key: str
    saved: torch.dtype
    loaded: torch.dtype

    def __str__(self) -> str:
        return f"{self.key} ({_dtype(self.saved)} -> {_dtype(self.loaded)})"


class Replacement(NamedTuple):
    """A value of one kind ("dict", "tensor", "int") that a saved one of another kind replaced."""

    key: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.key} ({self.was} -> {self.now})"


class Difference(NamedTuple):
    """A plain value that differed between the state and the checkpoint."""

    key: str
    live: object
    saved: object
    kept: bool
    """Whether the state's value stayed. Otherwise the state now has the saved value."""

    def __str__(self) -> str:
        what = (
            f"{self.live!r}, not {self.saved!r}"
            if self.kept
            else f"{self.live!r} -> {self.saved!r}"
        )
        return f"{self.key} ({what})"


@dataclass(frozen=True, repr=False)
class LoadReport:
    """The outcome of one rank's load. Keys are DCP's: the names of a path, joined by dots.
    The lists of true keys that pyckpt saves beside some dicts count neither as loaded nor as
    created.

    ``str(report)`` is a short summary; the lists are complete.
    """

    loaded: list[str] = field(default_factory=list)
    """Keys that the state had and that now hold the saved values."""
    filled: list[str] = field(default_factory=list)
    """Keys that were created: the state lacked them, or had None or an empty value."""
    converted: list[Conversion] = field(default_factory=list)
    """Tensors, among the loaded, whose dtype differs; they keep the state's dtype."""
    replaced: list[Replacement] = field(default_factory=list)
    """Values, among the loaded and filled, that had another kind than the saved value."""
    kept: list[str] = field(default_factory=list)
    """Keys of the state that stay as they were: the checkpoint lacks them, has them in another
    shape, or the caller asked to keep them."""
    dropped: list[str] = field(default_factory=list)
    """Keys that were removed: those beyond the end of a list that was saved shorter, and those in a
    dict or list that was saved as one value."""
    left_out: list[str] = field(default_factory=list)
    """Keys of the checkpoint under top-level entries that the caller did not pass."""
    unexpected: list[str] = field(default_factory=list)
    """Keys of the checkpoint, in containers that were passed, left out by ``unexpected="ignore"``.
    """
    not_verified: list[str] = field(default_factory=list)
    """Keys whose bytes were not checked: read in part, or by a reader that checks nothing."""
    differing: list[Difference] = field(default_factory=list)
    """Plain values, such as numbers and strings, that differed between state and checkpoint. Only
    ``Checkpointer.restore`` lists them."""
    bytes: int = 0
    """Bytes read if the reader counts them, else bytes of the tensors that were asked for."""
    seconds: float = 0.0
    """Wall-clock time of the whole load."""

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes over seconds, in units of 10^9 bytes a second; 0 when nothing was timed."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def summary(self) -> str:
        """One line: how many keys, bytes and seconds."""
        count = len(self.loaded) + len(self.filled)
        return (
            f"loaded {count} {'key' if count == 1 else 'keys'}, {size_text(self.bytes)} "
            f"in {seconds_text(self.seconds)} ({self.gigabytes_per_second:.2f} GB/s)"
        )

    def __repr__(self) -> str:
        lists = ("converted", "replaced", "kept", "dropped", "unexpected", "not_verified")
        counts = {name: len(getattr(self, name)) for name in lists}
        rest = "".join(f", {n} {name.replace('_', ' ')}" for name, n in counts.items() if n)
        return f"<LoadReport: {self.summary}{rest}>"

    def __str__(self) -> str:
        lines = [self.summary]
        for what, names in (
            ("created", self.filled),
            ("converted to the state's dtype", self.converted),
            ("replaced by what was saved", self.replaced),
            ("kept as they were", self.kept),
            ("otherwise in the state than saved", self.differing),
            ("dropped in favour of what was saved", self.dropped),
            ("in the checkpoint, not in the state, left out", self.unexpected),
            ("in the checkpoint, not asked for", self.left_out),
            ("not verified", self.not_verified),
        ):
            if names:
                lines.append(f"  {len(names)} {what}: {some(names)}")
        return "\n".join(lines)


def some(names: Iterable[object], limit: int = _NAMES_SHOWN) -> str:
    """Join the first ``limit`` of ``names`` and say how many more there are."""
    shown = [printable(str(name)) for name in names]
    rest = len(shown) - limit
    text = ", ".join(shown[:limit])
    return f"{text} and {rest} more" if rest > 0 else text


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
