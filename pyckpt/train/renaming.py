"""What was saved under other names than it has now, found under those of now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from pyckpt.errors import LoadError
from pyckpt.train.saved import Path, paths

__all__ = ["Rename", "renamed"]

Rename = Callable[[str], str]
"""Takes a key of the checkpoint, returns the key that it has in the state."""


def renamed(metadata: Metadata, path_of: Callable[[str, Path], Path]) -> Metadata:
    """The metadata of a checkpoint as if it had been saved under other paths.

    Args:
        path_of: takes a key and its path, and returns the path that it is to have.

    Raises:
        LoadError: two keys would have the same path.
    """
    before = paths(metadata)
    after = {key: path_of(key, path) for key, path in before.items()}
    if after == before:
        return metadata
    keys = {
        key: key if path == before[key] else ".".join(map(str, path)) for key, path in after.items()
    }
    owners: dict[str, str] = {}
    for key, new in keys.items():
        if new in owners:
            raise LoadError(f"{owners[new]} and {key} of the checkpoint would both be {new}")
        owners[new] = key
    storage: Any = metadata.storage_data
    if storage is not None:
        storage = {_renamed_index(index, keys): info for index, info in storage.items()}
    return replace(
        metadata,
        state_dict_metadata={keys[key]: item for key, item in metadata.state_dict_metadata.items()},
        planner_data={keys[key]: path for key, path in after.items()},
        storage_data=storage,
    )


def _renamed_index(index: MetadataIndex, keys: dict[str, str]) -> MetadataIndex:
    new = keys.get(index.fqn, index.fqn)
    return index if new == index.fqn else replace(index, fqn=new)
