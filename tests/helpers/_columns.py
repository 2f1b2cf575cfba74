"""Metadata as columns, made in Python, one item after another."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pyckpt import _C
from pyckpt.format.columns import MEMORY_FORMATS


def columns_from(metadata: Metadata) -> _C.Columns:
    """The columns of metadata that has a place for each item."""
    columns = _C.Columns()
    storage: Any = metadata.storage_data
    files = list(dict.fromkeys(info.relative_path for info in storage.values()))
    for name in files:
        columns.add_file(name)

    def put(item: int, index: MetadataIndex) -> None:
        known = dict(vars(storage[index]))
        known.pop("transform_descriptors", None)
        stride = known.pop("payload_stride", None)
        columns.set_place(item, files.index(known.pop("relative_path")), **known)
        if stride is not None:
            columns.set_stride(item, stride)

    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            put(columns.first_item(columns.add_object(key)), MetadataIndex(key))
            continue
        properties = tensor.properties
        number = columns.add_properties(
            str(properties.dtype).removeprefix("torch."),
            str(properties.layout),
            properties.requires_grad,
            list(MEMORY_FORMATS.values()).index(properties.memory_format),
            properties.pin_memory,
        )
        columns.add_tensor(key, number, tensor.size)
        for chunk in tensor.chunks:
            put(
                columns.add_chunk(chunk.offsets, chunk.sizes),
                MetadataIndex(key, chunk.offsets),
            )
    return columns


def plain(value: Any) -> Any:
    """All that metadata says, also what the classes of DCP leave out when they are compared.

    Dicts are in no order."""
    if isinstance(value, torch.Size):
        return ("size", *value)
    if isinstance(value, TensorProperties):
        return {str(k): v for k, v in vars(value).items()}
    if hasattr(value, "items"):
        return {_hashable(k): (plain(k), plain(v)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        if isinstance(value, TensorStorageMetadata):
            value.chunks  # noqa: B018 - makes them
        # What is None need not be there.
        parts = {k: plain(v) for k, v in vars(value).items() if v is not None}
        return type(value).__name__, parts
    return value


def _hashable(key: Any) -> Any:
    return (key.fqn, key.offset) if isinstance(key, MetadataIndex) else key
