"""Files of ``torch.save``, read without running code of theirs, and without much memory."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pyckpt.convert.stand_ins import Foreign, stand_in, value_of
from pyckpt.dcp.objects import load_file
from pyckpt.errors import CorruptCheckpoint, UnsafeCheckpoint
from pyckpt.format.files import open_regular

__all__ = ["TorchFile", "read_torch"]

_ZIP = b"PK\3\4"
# Tensors that share memory are written once for each name.
_GROWTH = 16
_GROWTH_FROM = 1 << 24


class TorchFile(NamedTuple):
    """The content of a file."""

    value: Any
    """Plain values and tensors on the CPU, whose memory are pages of the file."""
    left_out: dict[str, str]
    """What was not read since only code of the file could make it: key -> dotted name."""


def read_torch(path: Path) -> TorchFile:
    """Read a file of ``torch.save``.

    Raises:
        UnsafeCheckpoint: it cannot be read without code of its own.
        CorruptCheckpoint: it is no such file, or is damaged, or its tensors take much more memory
            than the file has.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        is_zip = file.read(len(_ZIP)) == _ZIP
    value = load_file(path, stand_in=stand_in) if is_zip else _read_old(path)
    cleaner = _Cleaner(size)
    try:
        value = cleaner.clean(value, "")
    except (RecursionError, _TooMuch):
        raise CorruptCheckpoint(
            f"{path} holds containers that hold themselves, or each other again and again",
            path=str(path),
        ) from None
    if isinstance(value, Foreign):
        raise UnsafeCheckpoint(
            f"{path} holds a {value.name}, and reading it would run its code; save its "
            "state_dict() in its place",
            path=str(path),
            refused=(value.name,),
        )
    if cleaner.bytes > _GROWTH * size + _GROWTH_FROM:
        raise CorruptCheckpoint(
            f"{path} has {size} bytes, and its tensors would take {cleaner.bytes}", path=str(path)
        )
    return TorchFile(value, cleaner.left_out)


def _read_old(path: Path) -> Any:
    """Read a file of torch 1.5 or older, as a whole."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what it is going to refuse
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpoint(
            f"{path} is no archive of torch.save, and as a pickle it cannot be read without "
            "running code of its own",
            path=str(path),
        ) from error
    except Exception as error:  # damaged bytes fail in any way
        raise CorruptCheckpoint(
            f"{path}: not a file of torch.save that can be read: {type(error).__name__}: {error}",
            path=str(path),
        ) from error


class _TooMuch(Exception):
    """A value takes more time to go through than its file's size justifies."""


class _Cleaner:
    """Takes stand-ins out of a value.

    Args:
        size: of the file in bytes, each of which may be one value.

    Attributes:
        left_out: what was taken out, by key.
        bytes: of the tensors.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self.left_out: dict[str, str] = {}
        self.bytes = 0

    def clean(self, value: Any, key: str) -> Any:
        """The value without stand-ins; or a stand-in, for one that cannot be without."""
        self._left -= 1
        if self._left < 0:
            raise _TooMuch
        if isinstance(value, Foreign):
            return value_of(value)
        if isinstance(value, torch.Tensor):
            self.bytes += value.numel() * value.element_size()
            return value.detach()
        if isinstance(value, Mapping):
            kept = {}
            for name, sub in value.items():
                where = f"{key}.{name}" if key else str(name)
                sub = self.clean(sub, where)
                if isinstance(sub, Foreign) or isinstance(name, Foreign):
                    self.left_out[where] = sub.name if isinstance(sub, Foreign) else name.name
                else:
                    kept[name] = sub
            if isinstance(value, OrderedDict | Counter):
                return type(value)(kept)
            return kept
        if isinstance(value, list | tuple | set):
            subs = [self.clean(sub, f"{key}.{i}" if key else str(i)) for i, sub in enumerate(value)]
            # Without one of them the others would be at other places.
            first = next((sub for sub in subs if isinstance(sub, Foreign)), None)
            if first is not None:
                return first
            kind: Any = type(value) if type(value) in (list, tuple, set, torch.Size) else list
            return kind(subs)
        return value
