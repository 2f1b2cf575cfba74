"""Stand-ins for objects in a file whose classes reading does not allow.

None of the file's code runs: a stand-in is made where the file would have made the object, and
drops what it is given. Arrays of numpy come back as the form in which pyckpt saves them, so numpy
need not be there.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pyckpt.dcp.whole import ARRAY
from pyckpt.format.sealed import Sealed

__all__ = ["Foreign", "stand_in", "value_of"]

_DTYPES = {
    "b1": torch.bool,
    "u1": torch.uint8,
    "i1": torch.int8,
    "u2": torch.uint16,
    "i2": torch.int16,
    "u4": torch.uint32,
    "i4": torch.int32,
    "u8": torch.uint64,
    "i8": torch.int64,
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
}


class Foreign(metaclass=Sealed):
    """An object that was not read. ``name`` is the dotted name of its class."""

    __slots__ = ()
    name = ""

    def __new__(cls, *_: Any, **__: Any) -> Foreign:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Type(Foreign):
    """``numpy.dtype``."""

    __slots__ = ("code", "order")
    name = "numpy.dtype"
    code: Any
    order: Any

    def __new__(cls, code: Any = "", *_: Any) -> _Type:
        self = object.__new__(cls)
        self.code, self.order = code, "|"
        return self

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _Array(Foreign):
    """The result of the function by which numpy makes arrays."""

    __slots__ = ("state",)
    name = "numpy.ndarray"
    state: Any

    def __new__(cls, *_: Any) -> _Array:
        self = object.__new__(cls)
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Scalar(Foreign):
    """A number of numpy's."""

    __slots__ = ("state",)
    name = "numpy.generic"
    state: Any

    def __new__(cls, kind: Any = None, data: Any = b"", *_: Any) -> _Scalar:
        self = object.__new__(cls)
        self.state = (1, (), kind, False, data)
        return self


_OURS = {"dtype": _Type, "_reconstruct": _Array, "scalar": _Scalar}


def stand_in(name: str) -> type:
    """The class to use in the place of a class or function of that dotted name."""
    module, _, attribute = name.rpartition(".")
    is_numpys = module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
    if is_numpys and attribute in _OURS:
        return _OURS[attribute]
    return Sealed(attribute, (Foreign,), {"__slots__": (), "name": name})


def value_of(one: Foreign) -> Any:
    """The value that a stand-in holds: an array or a number of numpy's; else itself."""
    if not isinstance(one, _Array | _Scalar):
        return one
    try:
        _, shape, kind, by_columns, data = one.state
        tensor = _tensor(tuple(shape), kind, bool(by_columns), bytes(data))
    except (TypeError, ValueError):
        return one
    if tensor is None:
        return one
    return tensor.item() if isinstance(one, _Scalar) else (ARRAY, tensor)


def _tensor(shape: Any, kind: Any, by_columns: bool, data: bytes) -> torch.Tensor | None:
    dtype = _DTYPES.get(kind.code) if isinstance(kind, _Type) else None
    if dtype is None or kind.order not in ("<", "|", "="):
        return None
    if any(type(size) is not int or size < 0 for size in shape):
        return None
    if math.prod(shape) * dtype.itemsize != len(data):
        return None
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    return (
        flat.view(shape[::-1]).permute(*range(len(shape))[::-1]) if by_columns else flat.view(shape)
    )
