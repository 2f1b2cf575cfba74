"""Tensors whose memory are pages of a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["map_file", "view"]


def map_file(path: str | Path, size: int, *, shared: bool = False) -> Any:
    """The first ``size`` bytes of a file as a storage. Only with ``shared`` does writing to it
    change the file."""
    return torch.UntypedStorage.from_file(str(path), shared, size)


def view(storage: Any, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the bytes from ``offset`` on; a copy if they are not aligned for its elements."""
    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if offset % dtype.itemsize:
        at, length, kind = offset, count * dtype.itemsize, torch.uint8
    else:
        at, length, kind = offset // dtype.itemsize, count, dtype
    flat = torch.empty(0, dtype=kind, device="cpu").set_(storage, at, (length,), (1,))
    return (flat if kind == dtype else flat.clone().view(dtype)).view(tuple(shape))
