"""Elements of any dtype as numbers to reckon with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["in_parts", "numbers"]

_PART = 1 << 19
"""Elements at a time: their copies as numbers take some MB."""
_WIDE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32}


def numbers(elements: torch.Tensor) -> torch.Tensor:
    """The elements as int64 or float64; a uint64 as float64; of complex ones the absolute values.

    Raises:
        TypeError: they are no numbers, or of a dtype that torch does not convert.
    """
    dtype = elements.dtype
    try:
        if dtype is torch.int64:
            return elements
        if dtype in _WIDE:
            return elements.to(torch.int64)
        if dtype.is_complex:
            return elements.to(torch.complex128).abs()
        return elements.to(torch.float64)
    except RuntimeError:  # torch has more dtypes than conversions
        raise TypeError(f"elements of {dtype} are not converted to numbers") from None


def in_parts(*elements: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """One-dimensional tensors of one size, some elements of each at a time."""
    for start in range(0, elements[0].numel(), _PART):
        yield tuple(one[start : start + _PART] for one in elements)
