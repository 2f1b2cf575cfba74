"""The values that a checkpoint's metadata describes, and where their parts lie."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from pyckpt import _C
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format.columns import columns_of
from pyckpt.format.metadata import StorageInfo
from pyckpt.train.store.catalog import NOTE_KEY

__all__ = ["Part", "Value", "value", "values"]


class Part(NamedTuple):
    """A part of a saved value, as it lies in a file. Places are in bytes."""

    offsets: tuple[int, ...]
    """Where it begins in the tensor, in elements; empty for an object."""
    sizes: tuple[int, ...]
    file: str
    offset: int
    """Of its first byte in the file."""
    length: int
    """With what is around the values."""
    payload_offset: int | None = None
    """Of the values, from the part's first byte; 0 where the part is no plain tensor. This and what
    follows is None where pyckpt did not write it."""
    payload_length: int | None = None
    crc32: int | None = None
    """CRC-32 of the values."""
    stride: tuple[int, ...] | None = None
    """In elements; None for row-major order."""
    transformed: bool = False
    """Whether an extension of DCP has changed the bytes (compressed them, say)."""
    xxh3: str | None = None
    """XXH3-128 of the values, in hexadecimal, of what is frozen."""


class Value(NamedTuple):
    """A saved value."""

    key: str
    dtype: torch.dtype | None
    """None for an object."""
    shape: tuple[int, ...]
    """Of the whole tensor; empty for an object."""
    parts: list[Part]


def values(metadata: Metadata, *, with_note: bool = False) -> Iterator[Value]:
    """All values in the order of the metadata; the note of a `Checkpointer` if ``with_note``.

    Raises:
        CorruptCheckpoint: the metadata does not say where one lies.
    """
    columns = columns_of(metadata)
    if columns is not None:
        for number in range(len(columns)):
            if with_note or columns.name(number) != NOTE_KEY:
                yield _of_columns(columns, number)
        return
    for key in metadata.state_dict_metadata:
        if with_note or key != NOTE_KEY:
            yield value(metadata, key)


def value(metadata: Metadata, key: str) -> Value:
    """The value of a key.

    Raises:
        KeyError: there is none of that name.
        CorruptCheckpoint: the metadata does not say where it lies.
    """
    saved = metadata.state_dict_metadata[key]
    if not isinstance(saved, TensorStorageMetadata):
        return Value(key, None, (), [_part((), (), _place(metadata, MetadataIndex(key)))])
    parts = [
        _part(
            tuple(chunk.offsets),
            tuple(chunk.sizes),
            _place(metadata, MetadataIndex(key, chunk.offsets, i)),
        )
        for i, chunk in enumerate(saved.chunks)
    ]
    return Value(key, saved.properties.dtype, tuple(saved.size), parts)


def _place(metadata: Metadata, index: MetadataIndex) -> StorageInfo:
    place: StorageInfo | None = (metadata.storage_data or {}).get(index)
    if place is None:
        raise CorruptCheckpoint(f"the metadata does not say where {index.fqn!r} lies")
    return place


def _part(offsets: tuple[int, ...], sizes: tuple[int, ...], info: StorageInfo) -> Part:
    extra = vars(info)
    return Part(
        offsets,
        sizes,
        info.relative_path,
        info.offset,
        info.length,
        extra.get("payload_offset"),
        extra.get("payload_length"),
        extra.get("crc32"),
        extra.get("payload_stride"),
        bool(extra.get("transform_descriptors")),
        extra.get("xxh3"),
    )


def _of_columns(columns: _C.Columns, number: int) -> Value:
    key = columns.name(number)
    first = columns.first_item(number)
    if not columns.is_tensor(number):
        file, offset, length, begin, size, crc32, _ = columns.place(first)
        return Value(key, None, (), [Part((), (), file, offset, length, begin, size, crc32)])
    parts = []
    for i in range(columns.chunk_count(number)):
        file, offset, length, begin, size, crc32, stride = columns.place(first + i)
        offsets, sizes = columns.chunk(number, i)
        parts.append(Part(offsets, sizes, file, offset, length, begin, size, crc32, stride))
    return Value(key, _dtype(columns.properties(number)[0]), columns.size(number), parts)


@cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
