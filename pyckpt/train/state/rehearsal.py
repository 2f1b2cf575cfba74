"""Tries the part of restoring that needs none of the program's objects."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from pyckpt.dcp import objects
from pyckpt.format.files import open_regular
from pyckpt.train.state.per_rank import check_complete
from pyckpt.train.state.saved import Tree, tree

__all__ = ["rehearse"]


def rehearse(directory: Path, metadata: Metadata) -> None:
    """Build the tree of the checkpoint, and load its objects.

    Raises:
        CorruptCheckpoint: items contradict each other, or are missing, or are not readable.
        UnsafeCheckpoint: an object contains a class that loading does not allow.
        OSError: a file cannot be read.
    """
    _check_ranks(tree(metadata), "")
    for index, info in (metadata.storage_data or {}).items():
        saved = metadata.state_dict_metadata.get(index.fqn)
        is_object = isinstance(saved, BytesStorageMetadata)
        # A tensor whose payload is the whole item is not plain memory, and is loaded as an object.
        is_opaque = (
            isinstance(saved, TensorStorageMetadata) and vars(info).get("payload_offset") == 0
        )
        if is_object or is_opaque:
            with open_regular(directory / info.relative_path) as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            objects.load(data, index.fqn, device=torch.device("cpu"))


def _check_ranks(node: Tree, name: str) -> None:
    if not isinstance(node, dict):
        return
    check_complete(node, name)
    for part, sub in node.items():
        _check_ranks(sub, f"{name}.{part}" if name else str(part))
