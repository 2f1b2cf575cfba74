"""Checkpoints made by hand, of what no save would write."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import pyckpt
from pyckpt.format import metadata as metadata_format

DCP = "torch.distributed.checkpoint.metadata"
NAME = "__0_0.distcp"
Box = tuple[tuple[int, ...], tuple[int, ...]]


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def described(
    size: Sequence[int], chunks: Sequence[Box] | None = None, dtype: torch.dtype = torch.float32
) -> TensorStorageMetadata:
    boxes = [((0,) * len(size), tuple(size))] if chunks is None else chunks
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
    )


def place(offset: int, length: int, name: str = NAME, **extra: Any) -> Any:
    info = metadata_format.StorageInfo(name, offset, length)
    vars(info).update(extra)
    return info


def at(key: str, *offsets: int, number: int = 0) -> MetadataIndex:
    return MetadataIndex(key, torch.Size(offsets), number)


def write(
    directory: Path,
    state: Mapping[str, Any],
    storage: Mapping[Any, Any] | None,
    data: bytes | None = b"",
    paths: Any = None,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    content = metadata_format.encode(Metadata(dict(state), paths, storage))
    (directory / ".metadata").write_bytes(content)
    if data is not None:
        (directory / NAME).write_bytes(data)
    return directory


def load(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    pyckpt.load(state, directory)
    return state


# --- pickles by opcode --------------------------------------------------------------------------


def name_of(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


MANY = 200_000


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value
