"""Encodes plain values to the bytes that ``torch.save`` writes, and decodes them, but faster.

A checkpoint of thousands of numbers has thousands of archives, each of which ``torch.save`` builds
and ``torch.load`` parses record by record. The archives of two values whose pickles have the same
length differ only in the pickle and its checksums. So the archive is made once for each length
(`pyckpt.format.envelope`), and an item is decoded by comparing its archive with that one.

A value is plain if its pickle names no class: numbers, strings, None, and tuples, lists and dicts
of these. ``torch.save`` and ``torch.load`` handle other values, and items that another version of
torch wrote.
"""

from __future__ import annotations

import io
import logging
import pickle
import zipfile
import zlib
from functools import cache, lru_cache
from typing import Any

import torch

from pyckpt import _C
from pyckpt.format.envelope import Archive, Record
from pyckpt.format.sealed import scan
from pyckpt.speaking import for_all

__all__ = ["NotPlain", "decode", "encode", "envelope_of"]

_logger = logging.getLogger("pyckpt")

_PICKLE = "data.pkl"
_PROTOCOL = 2  # torch.serialization.DEFAULT_PROTOCOL
# A pickle is built in memory twice. For larger ones, the cost of the archive does not matter.
_BYTES_MAX = 1 << 20
# As deep as pickle goes in a program that has not raised Python's recursion limit.
_DEPTH_MAX = 1000
_ATOMS = frozenset((int, float, bool, str, type(None)))
_SAMPLES: tuple[Any, ...] = (0, 1.5, "ü" * 40, [None, True, {"key": (1, 2**70)}], "x" * 1000)


class NotPlain(Exception):
    """The value, or the item, is one for ``torch.save`` or ``torch.load``."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        raise NotPlain


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise NotPlain


def encode(value: Any) -> bytes:
    """The bytes that ``torch.save(value, file)`` writes.

    Raises:
        NotPlain: the value is not plain, or very large.
        RecursionError: it is nested deeper than pickle can go.
    """
    if type(value) in _ATOMS:
        pickled = pickle.dumps(value, _PROTOCOL)
    else:
        file = io.BytesIO()
        _Pickler(file, _PROTOCOL).dump(value)
        pickled = file.getvalue()
    size = len(pickled)
    if size > _BYTES_MAX or not _is_known():
        raise NotPlain
    envelope = _envelope(size)
    return b"".join((envelope.prefix, pickled, envelope.suffix(zlib.crc32(pickled))))


def decode(item: bytes | memoryview) -> Any:
    """The value in an item that `encode` made. All bytes of the item are compared.

    Raises:
        NotPlain: `encode` did not make the item.
    """
    if not _is_known():
        raise NotPlain
    prefix = _envelope(1).prefix  # the same for any length but 0
    begin = len(prefix)
    if item[:begin] != prefix or not begin < len(item) <= _BYTES_MAX:
        raise NotPlain
    try:
        end = begin + scan(item[begin:], depth=_DEPTH_MAX)
        pickled = bytes(item[begin:end])
        if item[end:] != _envelope(end - begin).suffix(zlib.crc32(pickled)):
            raise NotPlain
        return _Unpickler(io.BytesIO(pickled)).load()
    except NotPlain:
        raise
    except Exception as error:  # hostile bytes can fail in any way that pickle can
        raise NotPlain from error


def envelope_of(size: int) -> _C.Envelope | None:
    """The bytes around a pickle of ``size`` bytes; None where this version of torch writes others,
    or the pickle is one that `encode` does not take."""
    return _envelope(size) if 0 < size <= _BYTES_MAX and _is_known() else None


@lru_cache(maxsize=4096)
def _envelope(size: int) -> _C.Envelope:
    """The bytes around a pickle of ``size`` bytes."""
    root, records = _records()
    there = [Record(name, bytes(size) if name == _PICKLE else data) for name, data in records]
    return Archive(root, there, size, payload=_PICKLE).envelope()


@cache
def _records() -> tuple[str, list[Record]]:
    file = io.BytesIO()
    torch.save(None, file)
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        root = names[0].partition("/")[0]
        return root, [Record(name.removeprefix(f"{root}/"), archive.read(name)) for name in names]


@cache
def _is_known() -> bool:
    """Whether this version of torch writes the same bytes."""
    try:
        for value in _SAMPLES:
            file = io.BytesIO()
            torch.save(value, file)
            pickled = pickle.dumps(value, _PROTOCOL)
            envelope = _envelope(len(pickled))
            made = envelope.prefix + pickled + envelope.suffix(zlib.crc32(pickled))
            if made != file.getvalue():
                raise ValueError(f"torch.save writes {type(value).__name__} in other bytes")
    except Exception as error:
        _logger.log(
            for_all(logging.WARNING), "plain values are written slowly, with torch.save: %s", error
        )
        return False
    return True
