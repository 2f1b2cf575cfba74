"""What a pickle gets to hold in the place of a class or function, and the cost of reading it."""

from __future__ import annotations

import pickle

from typing_extensions import Buffer

from pyckpt import _C

__all__ = ["Sealed", "scan"]

# Hashing what is of many times a pickle's size is not what reading it takes; a key is met in a few
# places, in a file that names it once.
_WORK_PER_BYTE = 64


class Sealed(type):
    """Metaclass of stand-ins: pickle's BUILD may set attributes of what a file names, so what it
    names must have none that can be set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"sets the attribute {name!r} of a class")


def scan(data: Buffer, *, depth: int) -> int:
    """Go through the pickle that ``data`` begins with, and make nothing. Returns its length.

    Raises:
        ValueError: it is damaged, nested deeper than ``depth``, or takes more memory or time to
            read than its size explains.
    """
    return _C.scan_pickle(data, depth=depth, work_per_byte=_WORK_PER_BYTE)
