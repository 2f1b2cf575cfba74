"""The path of a key in the saved state, as DCP's planner records it.

DCP names a value by its path joined with dots. Such a name is the same for ``{"a.b": x}`` and
``{"a": {"b": x}}``, and for a dict and a list. The path tells them apart. All code that puts saved
values back into a structure reads paths with this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["DEPTH_MAX", "Path", "check_paths", "path_of", "paths", "recorded_path"]

Path: TypeAlias = tuple[str | int, ...]
"""Keys of dicts are strings, as DCP makes all of them; an int is the index in a list."""

DEPTH_MAX = 256
# DCP records nothing for an empty dict, so a list may be longer than its known entries. Without a
# bound, a large index would allocate a large list.
_GAPS_FREE = 1 << 16
_GAPS_PER_KEY = 64


def recorded_path(metadata: Metadata, key: str) -> Path | None:
    """The recorded path of a key; None if none was recorded."""
    recorded = metadata.planner_data
    path = recorded.get(key) if isinstance(recorded, Mapping) else None
    return tuple(path) if isinstance(path, tuple | list) else None


def path_of(metadata: Metadata, key: str) -> Path:
    """The path of a key; the key itself if none was recorded."""
    return recorded_path(metadata, key) or (key,)


def paths(metadata: Metadata) -> dict[str, Path]:
    """The path of each key."""
    return {key: path_of(metadata, key) for key in metadata.state_dict_metadata}


def check_paths(metadata: Metadata) -> None:
    """Check the paths of all keys.

    Raises:
        ValueError: one is no path, or is deeper than ``DEPTH_MAX``; or lists are far longer than
            the number of keys justifies.
    """
    recorded = metadata.planner_data
    if not isinstance(recorded, Mapping):
        return
    lengths: dict[Path, int] = {}
    for key in metadata.state_dict_metadata:
        path = recorded.get(key)
        if not isinstance(path, tuple | list):
            continue
        if not path or len(path) > DEPTH_MAX:
            raise ValueError(f"the path of {key!r} has {len(path)} parts")
        for i, part in enumerate(path):
            if type(part) is str:
                continue
            if type(part) is not int or part < 0:
                raise ValueError(f"the path of {key!r} has a part that is no key and no index")
            of_list = tuple(path[:i])
            lengths[of_list] = max(lengths.get(of_list, 0), part + 1)
    known = len(metadata.state_dict_metadata)
    if sum(lengths.values()) > _GAPS_FREE + _GAPS_PER_KEY * known:
        raise ValueError(f"its lists would have {sum(lengths.values())} entries, of {known} keys")
