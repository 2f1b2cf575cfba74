"""Stand-ins for classes that a pickle names, and a check of what reading a pickle costs."""

from __future__ import annotations

import pickle

from typing_extensions import Buffer

from pyckpt import _C

__all__ = ["Sealed", "scan"]

# Reading an honest pickle does not hash many times its size: a key that it names once is used in a
# few places.
_WORK_PER_BYTE = 64


class Sealed(type):
    """Metaclass of stand-ins. pickle's BUILD sets attributes of an object that a file names, so the
    attributes of a stand-in cannot be set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"sets the attribute {name!r} of a class")


def scan(data: Buffer, *, depth: int) -> int:
    """Scan the pickle at the start of ``data`` without making objects. Returns its length in bytes.

    Raises:
        ValueError: it is damaged, nested deeper than ``depth``, or would take more memory or time
            to read than its size justifies.
    """
    return _C.scan_pickle(data, depth=depth, work_per_byte=_WORK_PER_BYTE)
