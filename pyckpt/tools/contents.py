"""What a checkpoint holds, by its metadata alone: keys, shapes, dtypes, parts, files; who saved it.

Nothing of the data is read but the note that a `Checkpointer` leaves. Checkpoints have hundreds of
thousands of keys, so a key is a tuple, made from the columns of the metadata where it has some.
"""

from __future__ import annotations

import errno
import fnmatch
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from pyckpt.collector import collector_paused
from pyckpt.dcp.reading import save_id_of
from pyckpt.errors import CorruptCheckpoint, PyckptError
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.remote.address import place_of
from pyckpt.remote.folder import RemoteFolder
from pyckpt.tools.values import Part, values
from pyckpt.train.store.catalog import Note, note_of
from pyckpt.train.store.part import Part as NodePart
from pyckpt.train.store.part import read_part

__all__ = ["Contents", "Key", "Node", "Saved", "contents", "metadata_of", "part_of", "ranks_of"]

_RANK = re.compile(r"__(\d+)_")
_LEVELS_MAX = 64
_GLOB = re.compile(r"[*?[]")


class Key(NamedTuple):
    """A saved value."""

    name: str
    kind: Literal["tensor", "object"]
    dtype: str
    """Such as ``float32``; empty for an object."""
    shape: tuple[int, ...]
    """Of the whole tensor; empty for an object."""
    shards: int
    """In how many parts it was saved."""
    bytes: int
    """Of its values, without what stock PyTorch's format puts around them: of a tensor by its shape
    and dtype, or by the elements that are there, and of an object as it is stored."""
    files: tuple[str, ...]
    """The data files with its parts."""
    elements_here: int | None = None
    """How many of its elements there are, where one rank saved a part of it for itself; None where
    all are there."""


@dataclass(frozen=True)
class Saved:
    """Who saved a checkpoint."""

    by: Literal["pyckpt", "stock PyTorch"]
    """``pyckpt`` if the metadata has checksums."""
    ranks: int
    """The ranks that wrote a data file."""
    version: str | None
    """DCP's version of the format of the metadata."""
    save_id: str | None
    time: float
    """When the metadata was written, in seconds since 1970, by the file system's clock."""
    step: int | None
    """By the note of a `Checkpointer`; None without one. So are the two below."""
    final: bool
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds."""

    path: Path | str
    """Its directory, or its URL."""
    saved: Saved
    files: dict[str, int]
    """The data files, and the bytes that each must have."""
    metadata: Metadata
    keys: list[Key]
    """In the order of the metadata, but for the note of a `Checkpointer`."""
    elsewhere: frozenset[str] = frozenset()
    """The data files that other nodes have, where each node has a directory of its own."""

    def is_here(self, parts: Iterable[Part]) -> bool:
        """Whether none of these parts of a value is in a file of another node."""
        return not any(part.file in self.elsewhere for part in parts)

    def matching(self, pattern: str | None) -> list[Key]:
        """The key of that name; or those below it; or those that match it, if it is a pattern as
        shells have them (``*.weight``)."""
        if pattern is None:
            return self.keys
        found = [key for key in self.keys if key.name == pattern]
        if not found:
            found = [key for key in self.keys if key.name.startswith(f"{pattern}.")]
        if not found and _GLOB.search(pattern):
            matches = re.compile(fnmatch.translate(pattern)).match
            found = [key for key in self.keys if matches(key.name)]
        return found


def contents(path: str | os.PathLike[str], *, rank: int | None = None) -> Contents:
    """Read what a checkpoint holds, without running code of it.

    Args:
        path: its directory, or its URL in an object store.
        rank: whose checkpoint, where each rank saved its own (``use_collectives=False``).

    Raises:
        FileNotFoundError, NotADirectoryError: there is no checkpoint.
        CorruptCheckpoint, UnsafeCheckpoint: its metadata is damaged, or asks for code.
        OSError: it cannot be read.
    """
    place = place_of(path)
    name = commit.metadata_name(rank)
    read = None
    if isinstance(place, str):
        folder = RemoteFolder(place)
        metadata, time, read = _metadata_there(folder, name), folder.time(name), folder.range
    else:
        metadata, time = metadata_of(place, rank), os.stat(place / name).st_mtime
    files = metadata_format.data_files(metadata)
    note = None
    with suppress(OSError, PyckptError):  # what is damaged can be looked into all the same
        note = note_of(place, metadata, read)
    note = note or Note(None, False, {})
    elsewhere: frozenset[str] = frozenset()
    with suppress(OSError, PyckptError):
        part = None if isinstance(place, str) else part_of(place, metadata)
        if part is not None:
            assert isinstance(place, Path)
            elsewhere = frozenset(part.on_other_nodes(place, files))
            note = Note(note.step, part.final, part.metrics)
    with collector_paused():
        keys, checked = _keys(metadata)
    meta = metadata.storage_meta
    saved = Saved(
        by="pyckpt" if checked else "stock PyTorch",
        ranks=ranks_of(files),
        version=getattr(metadata, "version", None),
        save_id=None if meta is None else meta.save_id,
        time=time,
        step=note.step,
        final=note.final,
        metrics=dict(note.metrics),
    )
    return Contents(place, saved, files, metadata, keys, elsewhere)


def _metadata_there(folder: RemoteFolder, name: str) -> Metadata:
    try:
        data = folder.read(name, most=metadata_format.SIZE_MAX)
    except FileNotFoundError:
        inner = folder.folders()
        why = f"no checkpoint is at this address: it has no {name}"
        if inner:
            why = f"{why}; below it there is {inner[-1]}"
        raise FileNotFoundError(errno.ENOENT, why, str(folder)) from None
    return metadata_format.decode(data, path=folder.path(name))


def metadata_of(directory: Path, rank: int | None = None) -> Metadata:
    """The metadata of a checkpoint. Raises as `contents`; an error says what is there instead."""
    try:
        return metadata_format.read(directory / commit.metadata_name(rank))
    except (FileNotFoundError, NotADirectoryError):
        pass
    if directory.is_file():
        raise commit.no_checkpoint(directory)
    names = os.listdir(directory)
    if rank is None and commit.lost_metadata(names):
        raise CorruptCheckpoint(f"{directory}: {commit.LOST_METADATA}", path=str(directory))
    raise commit.no_checkpoint(directory)


def part_of(directory: Path, metadata: Metadata) -> NodePart | None:
    """What a node has of a checkpoint; None where each node has all of it. Raises as `read_part`.

    Args:
        directory, metadata: of the checkpoint.
    """
    save_id = save_id_of(metadata)
    return None if save_id is None else read_part(directory, save_id)


def ranks_of(files: Iterable[str]) -> int:
    """How many ranks wrote these data files."""
    return len({match[1] if (match := _RANK.match(name)) else name for name in files})


def _keys(metadata: Metadata) -> tuple[list[Key], bool]:
    """The keys, and whether there are checksums of pyckpt."""
    found = []
    checked = False
    for key, dtype, shape, parts in values(metadata):
        checked = checked or any(part.crc32 is not None for part in parts)
        files = tuple(dict.fromkeys([part.file for part in parts]))
        if dtype is None:
            found.append(Key(key, "object", "", (), 1, parts[0].length, files))
            continue
        count = math.prod(shape)
        here = min(count, sum(math.prod(part.sizes) for part in parts))
        found.append(
            Key(
                key,
                "tensor",
                _short(dtype),
                shape,
                len(parts),
                here * dtype.itemsize,
                files,
                here if here < count else None,
            )
        )
    return found, checked


@cache
def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the tree -------------------------------------------------------------------------------------


class Node:
    """A name in the tree of keys, which are split at their dots. What is below it is split when
    somebody looks, since most of a large tree is not shown.

    Attributes:
        name: from the root: ``model.layers``.
        count: how many values there are at and below it.
        bytes: of these.
    """

    def __init__(self, name: str, keys: list[Key], start: int, level: int) -> None:
        self.name = name
        self.count = len(keys)
        self.bytes = sum(key.bytes for key in keys)
        self._keys = keys
        self._start = start  # of the next part, in the keys' names
        self._level = level
        self._key: Key | None = None
        self._children: list[Node] | None = None

    @classmethod
    def of(cls, keys: Iterable[Key]) -> Node:
        """The root of some keys."""
        return cls("", list(keys), 0, 0)

    @property
    def key(self) -> Key | None:
        """Its own value, if it has one."""
        self.children()
        return self._key

    def children(self) -> list[Node]:
        """The nodes right below it."""
        if self._children is None:
            groups: dict[str, list[Key]] = {}
            with collector_paused():
                for key in self._keys:
                    name = key.name
                    if len(name) < self._start:
                        self._key = key
                        continue
                    # A key of a million dots is not split at each of them.
                    end = name.find(".", self._start) if self._level < _LEVELS_MAX else -1
                    groups.setdefault(name if end < 0 else name[:end], []).append(key)
            self._children = [
                Node(name, keys, len(name) + 1, self._level + 1) for name, keys in groups.items()
            ]
        return self._children

    def _forked(self) -> Node:
        """This node, or the first one below it that has a value or a fork."""
        node = self
        while node.key is None and len(node.children()) == 1:
            (node,) = node.children()
        return node

    def rows(self, depth: int | None) -> Iterator[tuple[int, Node]]:
        """The nodes below this one, each with its level, from 0 on; not deeper than ``depth``. Of a
        chain of nodes without a fork, only the last one."""
        pending = [(0, child) for child in reversed(self.children())]
        while pending:
            level, node = pending.pop()
            node = node._forked()
            yield level, node
            if depth is None or level + 1 < depth:
                pending += [(level + 1, child) for child in reversed(node.children())]

    def depth_of(self, rows: int) -> int | None:
        """The greatest depth at which there are no more than so many rows; at least 1. None for
        all of it."""
        level = total = 0
        nodes = self.children()
        while nodes:
            total += len(nodes)
            if total > rows:
                return max(1, level)
            level += 1
            nodes = [child for node in nodes for child in node._forked().children()]
        return None
