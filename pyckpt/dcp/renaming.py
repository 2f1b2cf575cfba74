"""Renames the keys of a checkpoint, so that a state with other keys can be loaded from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from pyckpt.dcp.template import Path
from pyckpt.errors import LoadError
from pyckpt.format.columns import PlacesMapping
from pyckpt.private import StorageInfo

__all__ = [
    "WRAPPERS",
    "Rename",
    "as_saved",
    "function_of",
    "moved",
    "renamed",
    "stored_keys",
    "wrappers_hint",
]

Rename = Callable[[str], str]
"""Takes a key of the checkpoint, returns the key that it has in the state."""


def function_of(rename: Rename | Mapping[str, str] | None) -> Rename | None:
    """A function for what may also be a mapping of the keys that change.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(rename, Mapping):
        names = dict(rename)
        return lambda key: names.get(key, key)
    if rename is not None and not callable(rename):
        raise TypeError(
            "rename must be a function of a key, or a mapping of the keys that change, not a value "
            f"of type {type(rename).__name__}."
        )
    return rename


def renamed(
    metadata: Metadata, before: Mapping[str, Path], path_of: Callable[[str, Path], Path]
) -> Metadata:
    """The metadata of a checkpoint as if it had been saved under other paths.

    Args:
        before: the path of each key.
        path_of: takes a key and its path, and returns the new path.

    Raises:
        LoadError: two keys would have the same path.
    """
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
    storage = metadata.storage_data
    return replace(
        metadata,
        state_dict_metadata={keys[key]: item for key, item in metadata.state_dict_metadata.items()},
        planner_data={keys[key]: path for key, path in after.items()},
        storage_data=None if storage is None else _RenamedPlaces(metadata, keys),
    )


def as_saved(metadata: Metadata) -> Metadata:
    """The metadata of the checkpoint before it was `renamed`."""
    storage = metadata.storage_data
    return as_saved(storage.metadata) if isinstance(storage, _RenamedPlaces) else metadata


def stored_keys(metadata: Metadata) -> set[str]:
    """The keys of everything in the checkpoint, even if this rank's metadata shows only a part."""
    places: Any = metadata.storage_data or {}
    if isinstance(places, _RenamedPlaces):
        return set(map(places.new_key, stored_keys(places.metadata)))
    if isinstance(places, PlacesMapping):
        return {places.columns.name(key) for key in range(len(places.columns))}
    return {index.fqn for index in places}


class _RenamedPlaces(Mapping[MetadataIndex, StorageInfo]):
    """The places of items, by their new keys. There may be millions of items, so each is renamed
    only when it is asked for.

    Args:
        metadata: with the old keys.
        keys: the new key of each old one.
    """

    def __init__(self, metadata: Metadata, keys: dict[str, str]) -> None:
        self.metadata = metadata
        self._new = keys
        self._old = {new: key for key, new in keys.items()}

    def new_key(self, key: str) -> str:
        """The key that an old one has become."""
        return self._new.get(key, key)

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        key = index.fqn
        if key in self._new and key not in self._old:
            raise KeyError(index)  # it has another key now
        storage: Any = self.metadata.storage_data
        found: StorageInfo = storage[_with_key(index, self._old.get(key, key))]
        return found

    def __iter__(self) -> Iterator[MetadataIndex]:
        storage: Any = self.metadata.storage_data
        return (_with_key(index, self.new_key(index.fqn)) for index in storage)

    def __len__(self) -> int:
        storage: Any = self.metadata.storage_data
        return len(storage)


def _with_key(index: MetadataIndex, key: str) -> MetadataIndex:
    return index if index.fqn == key else replace(index, fqn=key)


def moved(key: str, path: Path, new: str, names: Collection[str]) -> Path:
    """The new path of an item whose key changes from ``key`` to ``new``.

    Args:
        names: of the objects in the state. The new key should begin with one of these.
    """
    if new == key:
        return path
    if not isinstance(new, str):
        raise TypeError(f"rename({key!r}) returned {new!r}, which is no key")
    owner = max((n for n in names if new == n or new.startswith(f"{n}.")), key=len, default=None)
    if owner is None:
        return (new,)
    if new == owner:
        return (owner,)
    return (owner, *_aligned(path[1:], new[len(owner) + 1 :]))


def _aligned(path: Path, key: str) -> Path:
    """A path for a key. Parts of the old path at the ends of the key stay parts of their own; the
    rest of the key, between them, is one part."""
    head: list[str | int] = []
    tail: list[str | int] = []
    rest = list(path)
    while len(rest) > 1 and key.startswith(f"{rest[0]}."):
        key = key[len(str(rest[0])) + 1 :]
        head.append(rest.pop(0))
    while len(rest) > 1 and key.endswith(f".{rest[-1]}"):
        key = key[: -len(str(rest[-1])) - 1]
        tail.insert(0, rest.pop())
    return (*head, rest[0] if rest and str(rest[0]) == key else key, *tail)


WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module")
"""The parts that FSDP1, activation checkpointing, torch.compile and Fabric add to names."""
_REPLICAS = "module"
"""What DDP and DataParallel add, and what a submodule may be called as well."""


def wrappers_hint(missing: Iterable[str], unused: Iterable[str]) -> str:
    """What to do about keys of a state that the checkpoint has by the names of a module that is
    wrapped otherwise; empty if there are none, or to be appended to an error.

    Args:
        missing: keys of the state that the checkpoint lacks.
        unused: keys of the checkpoint that the state lacks.
    """
    by_bare = {_bare(key): key for key in unused}
    pairs = [(key, by_bare[_bare(key)]) for key in missing if _bare(key) in by_bare]
    if not pairs:
        return ""
    mine, saved = pairs[0]
    hint = (
        f"; the names of {len(pairs)} differ by the prefix of a module's wrapper alone, as {mine} "
        f"does from {saved} of the checkpoint: "
    )
    # The name alone does not show whether a saved "module" is a wrapper's.
    if any(_replicas(saved) > _replicas(mine) for mine, saved in pairs):
        return f"{hint}rename= gives them the state's names"
    return f"{hint}pyckpt.load_model and Checkpointer.restore match them, and so does rename="


def _bare(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in (*WRAPPERS, _REPLICAS))


def _replicas(key: str) -> int:
    return key.split(".").count(_REPLICAS)
