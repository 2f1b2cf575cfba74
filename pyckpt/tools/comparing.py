"""Compares two checkpoints: keys, shapes, dtypes, and every element, in bounded memory.

Both are read side by side, whatever the shards in which each was saved.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from pyckpt.engine import Engine
from pyckpt.errors import PyckptError
from pyckpt.tools import objects
from pyckpt.tools.contents import Contents, Key, contents
from pyckpt.tools.numbers import in_parts, numbers
from pyckpt.tools.streams import ELSEWHERE, Streams, why_opaque
from pyckpt.tools.values import value
from pyckpt.train.store.pieces import Direct

__all__ = ["Comparison", "Difference", "compare"]


@dataclass
class Difference:
    """What differs under one key."""

    key: str
    kind: Literal["only in A", "only in B", "kind", "shape", "dtype", "values", "not compared"]
    """``dtype``: the values may be equal or not, as the numbers say. ``not compared``: one of the
    two is damaged, or cannot be read, or is on another node."""
    a: str = ""
    """What A has there, in a few words."""
    b: str = ""
    count: int = 0
    """How many elements there are."""
    different: int = 0
    """How many elements differ by more than the tolerances allow, or are NaN in one alone."""
    max_abs: float = 0.0
    """The largest difference between two elements that are not NaN."""
    max_rel: float = 0.0
    """The largest quotient of a difference and the larger absolute value of the two; at most 2."""
    nan_a: int = 0
    """How many elements of A are NaN."""
    nan_b: int = 0
    why: str = ""
    """Why it was not compared."""


@dataclass
class Comparison:
    """How two checkpoints differ."""

    a: Contents
    b: Contents
    differences: list[Difference] = field(default_factory=list)
    """By key."""
    equal: int = 0
    """How many keys are equal, or within the tolerances."""
    bytes: int = 0
    """Of the values that were compared, in A."""

    @property
    def good(self) -> bool:
        return not self.differences


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    pattern: str | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    only_metadata: bool = False,
    direct: Direct = "auto",
    engine: Engine | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Compare two checkpoints. What cannot be read of either raises nothing, and is a difference.

    Two elements are equal if they differ by ``atol + rtol * abs(b)`` at most, or are both NaN. The
    note of a `Checkpointer` is left out.

    Args:
        a, b: directories of checkpoints, of pyckpt or of stock PyTorch.
        pattern: the keys to compare, as `Contents.matching` takes them.
        only_metadata: compare keys, shapes and dtypes alone, and read no values.
        direct, engine: as for `DirectReader`.
        progress: called with the bytes of A done, and in all.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CorruptCheckpoint, UnsafeCheckpoint: its metadata is damaged, or asks for code.
        OSError: it cannot be read.
        ValueError: a tolerance is negative, or no key matches ``pattern``.
    """
    if not (atol >= 0 and rtol >= 0):
        raise ValueError(f"{atol = } and {rtol = } must be 0 or more.")
    found = Comparison(contents(a), contents(b))
    in_a = {key.name: key for key in found.a.matching(pattern)}
    in_b = {key.name: key for key in found.b.matching(pattern)}
    if not in_a and not in_b and pattern is not None:
        raise ValueError(f"neither checkpoint has a key {pattern!r}")
    tensors: list[Key] = []
    others: list[Key] = []
    for name in in_a | in_b:
        if name not in in_b:
            found.differences.append(Difference(name, "only in A", a=_words(in_a[name])))
        elif name not in in_a:
            found.differences.append(Difference(name, "only in B", b=_words(in_b[name])))
        else:
            x, y = in_a[name], in_b[name]
            if x.kind != y.kind:
                found.differences.append(Difference(name, "kind", _words(x), _words(y)))
            elif x.shape != y.shape:
                found.differences.append(Difference(name, "shape", _words(x), _words(y)))
            elif only_metadata:
                _Values(x, y, atol, rtol).finish(found)
            else:
                saved = value(found.a.metadata, name), value(found.b.metadata, name)
                plain = not any(map(why_opaque, saved))
                sides = {"A": found.a.is_here(saved[0].parts), "B": found.b.is_here(saved[1].parts)}
                if not all(sides.values()):
                    whose = " and ".join(side for side, is_here in sides.items() if not is_here)
                    found.differences.append(
                        Difference(
                            name,
                            "not compared",
                            _words(x),
                            _words(y),
                            why=f"{whose}: {ELSEWHERE}",
                        )
                    )
                    continue
                (tensors if plain else others).append(x)
    total = sum(key.bytes for key in [*tensors, *others])
    progress(0, total)
    for key in others:
        _compare_objects(found, key, in_b[key.name])
        progress(found.bytes, total)
    streams = Streams([found.a, found.b], direct=direct, engine=engine)
    current: _Values | None = None
    for name, event in streams.read(streams.in_order([key.name for key in tensors])):
        if event is None:
            if current is not None and current.key.name != name:
                current.finish(found)
                progress(found.bytes, total)
            current = _Values(in_a[name], in_b[name], atol, rtol)
        elif isinstance(event, Exception):
            assert current is not None
            current.fail(event)
        else:
            assert current is not None
            current.add(*event)
            progress(found.bytes + current.bytes, total)
    if current is not None:
        current.finish(found)
    progress(total, total)
    found.differences.sort(key=lambda one: one.key)
    return found


def _words(key: Key) -> str:
    if key.kind == "object":
        return "object"
    return f"{key.dtype} {list(key.shape)}"


class _Values:
    """The comparison of two tensors of one shape."""

    def __init__(self, a: Key, b: Key, atol: float, rtol: float) -> None:
        self.key = a
        self.bytes = 0
        self._found = Difference(
            a.name, "values" if a.dtype == b.dtype else "dtype", _words(a), _words(b)
        )
        self._atol, self._rtol = atol, rtol
        self._failed = False

    def fail(self, error: Exception) -> None:
        self._failed = True
        text = str(error) or type(error).__name__
        self._found = Difference(self.key.name, "not compared", why=text)

    def finish(self, comparison: Comparison) -> None:
        comparison.bytes += self.key.bytes
        if self._failed or self._found.different or self._found.kind == "dtype":
            comparison.differences.append(self._found)
        else:
            comparison.equal += 1

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.bytes += a.nbytes
        if self._failed:
            return
        try:
            for x, y in in_parts(a, b):
                self._add(x, y)
        except TypeError as error:
            if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                self._found.count += a.numel()
            else:
                self.fail(error)

    def _add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        found = self._found
        found.count += a.numel()
        is_complex = a.is_complex() or b.is_complex()
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            if a.is_floating_point() or is_complex:
                nan = int(numbers(a).isnan().sum())
                found.nan_a += nan
                found.nan_b += nan
            return
        if is_complex:
            x, y = a.to(torch.complex128), b.to(torch.complex128)
        else:
            x, y = numbers(a), numbers(b)
        unequal = x != y
        if a.dtype is b.dtype is torch.uint64:  # more than a float64 tells apart
            unequal = a.view(torch.int64) != b.view(torch.int64)
        nan_x, nan_y = x.isnan(), y.isnan()
        found.nan_a += int(nan_x.sum())
        found.nan_b += int(nan_y.sum())
        x, y = x[unequal], y[unequal]
        apart = ~(nan_x & nan_y)[unequal]
        x, y = x[apart], y[apart]
        gap = _gap(x, y)
        if not is_complex:
            x, y = x.to(torch.float64), y.to(torch.float64)
        allowed = self._atol + self._rtol * y.abs()
        # An infinity is near to nothing else. What is unequal may have no gap that a float64 shows.
        near = (gap <= allowed) & (allowed > 0) & x.isfinite() & y.isfinite()
        found.different += int((~near).sum())
        numeric = ~gap.isnan()
        if bool(numeric.any()):
            gap = gap[numeric]
            larger = torch.maximum(x.abs(), y.abs())[numeric]
            found.max_abs = max(found.max_abs, float(gap.max()))
            finite = larger.isfinite() & (larger > 0)
            relative = (gap[finite] / larger[finite]).max() if bool(finite.any()) else 0.0
            if not bool(larger.isfinite().all()):
                relative = math.inf
            found.max_rel = max(found.max_rel, float(relative))


def _gap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How far numbers are apart, as float64."""
    if x.is_complex() or x.is_floating_point() or y.is_floating_point():
        return (x - y).abs()
    rough = (x.to(torch.float64) - y.to(torch.float64)).abs()
    # Large integers can be neighbours. Their difference is exact, unless they are far apart.
    return torch.where(rough < 2.0**60, (x - y).abs().to(torch.float64), rough)


def _compare_objects(found: Comparison, key: Key, other: Key) -> None:
    """Compare values that are no plain tensors: by their bytes, or else loaded."""
    found.bytes += key.bytes
    name = key.name
    parts = value(found.a.metadata, name).parts, value(found.b.metadata, name).parts
    if any(part.transformed for part in [*parts[0], *parts[1]]):
        why = "transformed by an extension of DCP"
        found.differences.append(Difference(name, "not compared", why=why))
        return
    if len(parts[0]) != 1 or len(parts[1]) != 1:
        why = "saved in parts that are no plain tensors"
        found.differences.append(Difference(name, "not compared", why=why))
        return
    (x,), (y,) = parts
    a, b = found.a.path, found.b.path
    try:
        if objects.read(a, name, x) == objects.read(b, name, y):
            found.equal += 1
            return
        old, new = objects.load(a, name, x), objects.load(b, name, y)
    except (OSError, PyckptError) as error:
        found.differences.append(Difference(name, "not compared", why=str(error)))
        return
    if objects.same(old, new):
        found.equal += 1
    else:
        words = objects.describe(old), objects.describe(new)
        found.differences.append(Difference(name, "values", *words, count=1, different=1))
