"""Saved objects, read without running code of theirs, shown in a few words, and compared."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from pyckpt import _C
from pyckpt.dcp import objects
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format.files import open_regular
from pyckpt.remote.folder import RemoteFolder
from pyckpt.tools.values import Part

__all__ = ["describe", "load", "read", "same"]

_BYTES_MAX = 256 << 20
_SHOWN = 60


def read(directory: Path | str, key: str, part: Part) -> bytes:
    """The bytes of an item that is no plain tensor. Its checksum is compared, where it has one.

    Raises:
        CorruptCheckpoint: it has more than 256 MiB, its file is too short, or its bytes are not
            those that were saved.
        OSError: the file cannot be read.
    """
    path = f"{directory}/{part.file}"
    if part.length > _BYTES_MAX:
        raise CorruptCheckpoint(f"{key} has {part.length} bytes, which is too much for an object")
    with _opened(directory, part.file) as file:
        file.seek(part.offset)
        data: bytes = file.read(part.length)
    if len(data) != part.length:
        raise CorruptCheckpoint(f"{key} lies beyond the end of {path}", key=key, path=path)
    # The checksum of what an extension of DCP has transformed is not known to be of these bytes.
    if part.crc32 is not None and not part.transformed:
        assert part.payload_offset is not None
        assert part.payload_length is not None
        end = part.payload_offset + part.payload_length
        found = _C.crc32(data[part.payload_offset : end])
        if found != part.crc32:
            raise CorruptCheckpoint(
                f"{key} in {path} at {part.offset}: CRC-32 expected {part.crc32:#010x}, found "
                f"{found:#010x}",
                key=key,
                path=path,
                offset=part.offset,
                expected=part.crc32,
                found=found,
            )
    return data


def _opened(directory: Path | str, name: str) -> AbstractContextManager[Any]:
    if isinstance(directory, str):
        return RemoteFolder(directory).open(name)
    return open_regular(directory / name)


def load(directory: Path | str, key: str, part: Part) -> Any:
    """An object.

    Raises:
        UnsafeCheckpoint: it contains a class or function that loading does not allow.
        CorruptCheckpoint, OSError: as `read`, and if the bytes are no object.
    """
    data = io.BytesIO(read(directory, key, part))
    return objects.load(data, key, device=torch.device("cpu"))


def describe(value: Any) -> str:
    """A value in a few words. Text of a checkpoint is not made fit for a terminal."""
    if value is None or type(value) in (bool, float):
        return repr(value)
    if type(value) is int:
        return repr(value) if value.bit_length() < 200 else f"an int of {value.bit_length()} bits"
    if type(value) is str:
        return repr(value) if len(value) <= _SHOWN else repr(value[:_SHOWN]) + "..."
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)}, {value.dtype}"
    size = f" of {len(value)}" if isinstance(value, dict | list | tuple | set | bytes) else ""
    return f"{type(value).__name__}{size}"


def same(a: Any, b: Any) -> bool:
    """Whether two loaded objects are equal. NaN is equal to NaN."""
    try:
        return _same(a, b, set())
    except RecursionError:
        return False


def _same(a: Any, b: Any, known: set[tuple[int, int]]) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _same_tensors(a, b)
    if not isinstance(a, dict | list | tuple):
        return bool(a == b) or (a != a and b != b)
    # A file can refer to one list many times, from others that it refers to many times.
    if (id(a), id(b)) in known:
        return True
    known.add((id(a), id(b)))
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], known) for key in a)
    return all(_same(x, y, known) for x, y in zip(a, b, strict=True))


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return False  # its bytes differ, which is all that is known
    if a.is_floating_point() and a.itemsize > 1:
        return bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    return torch.equal(a, b)
