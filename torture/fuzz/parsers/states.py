"""The state that checkpoints hold here, and how two of them are compared."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

__all__ = ["empty", "same", "state"]


def state() -> dict[str, Any]:
    return {
        "w": torch.arange(24.0).reshape(4, 6),
        "t": torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
        "b": torch.arange(5).to(torch.bfloat16),
        "e": torch.empty(0),
        "nested": {"n": 3, "text": "é", "list": [1, 2.5, None, torch.ones(2)]},
        "object": OrderedDict(a=torch.ones(3), b={1, 2}),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and bool(torch.equal(one, other))
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def empty(value: Any) -> Any:
    """A state of the same form, with other values."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    if isinstance(value, OrderedDict):
        return None
    if isinstance(value, dict):
        return {key: empty(sub) for key, sub in value.items()}
    return [empty(sub) for sub in value] if isinstance(value, list) else None
