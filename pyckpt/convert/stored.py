"""The content of a DCP checkpoint, in little memory of the process: tensors lie in the pages of a
file that has no name, which the system writes out if it needs the room."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pyckpt.convert.mapped import map_file, view
from pyckpt.dcp.load import load
from pyckpt.dcp.objects import Allowed
from pyckpt.dcp.reader import DirectReader
from pyckpt.dcp.report import LoadReport, some
from pyckpt.engine import Engine
from pyckpt.errors import LoadError
from pyckpt.format.paths import paths
from pyckpt.train.state.saved import Tree, tree
from pyckpt.train.store.catalog import reading
from pyckpt.train.store.pieces import Direct

__all__ = ["Stored", "stored"]

_ALIGNMENT = 64
_SMALL_BYTES = 4096


class Stored:
    """The content of a checkpoint.

    Attributes:
        state: what was saved, in dicts and lists as it was then.
        report: of the load.
        tree: its items, each at the path that it had in the state.
    """

    def __init__(self, state: dict[str, Any], report: LoadReport, tree: Tree) -> None:
        self.state = state
        self.report = report
        self.tree = tree


@contextmanager
def stored(
    path: Path,
    *,
    scratch: Path,
    keys: Sequence[str] | None = None,
    numbers_only: bool = False,
    allow: Sequence[Allowed] = (),
    direct: Direct = "auto",
    engine: Engine | None = None,
) -> Iterator[Stored]:
    """Read a checkpoint of pyckpt or of stock, and check what has checksums.

    Args:
        path: the checkpoint's directory. It is not pruned while the block runs.
        scratch: an existing directory, in which there is room for the tensors.
        keys: the top-level entries to read, default all.
        numbers_only: read no tensor of several elements; a tensor on the device "meta" shows its
            shape and dtype.
        allow: as for `pyckpt.load`.

    Raises:
        LoadError: it has none of the ``keys``.
        OSError, PyckptError: as `pyckpt.load`.
    """
    with reading(path), tempfile.TemporaryFile(dir=scratch, prefix=".pyckpt-") as file:
        reader = DirectReader(path, direct=direct, engine=engine)
        metadata = reader.read_metadata()
        places = paths(metadata)
        tops = dict.fromkeys(str(place[0]) for place in places.values())
        wanted = dict.fromkeys(tops if keys is None else keys)
        absent = [key for key in wanted if key not in tops]
        if absent:
            raise LoadError(
                f"{path} has no {some(absent, 20)}; it has {some(tops, 20)}", missing=tuple(absent)
            )
        large = {
            key: item
            for key, item in metadata.state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
            and item.size.numel() > 1
            and str(places[key][0]) in wanted
        }
        if numbers_only:
            kept = {k: v for k, v in metadata.state_dict_metadata.items() if k not in large}
            shown: Any = _Narrowed(reader, replace(metadata, state_dict_metadata=kept))
            # Entries of tensors alone are not in the narrowed metadata.
            left = {str(places[key][0]) for key in kept}
            state: dict[str, Any] = {key: None for key in wanted if key in left}
            report = load(state, reader=shown, allow=allow, no_dist=True)
            for key, item in large.items():
                _put(state, places[key], _shape_of(item))
        else:
            state = dict.fromkeys(wanted)
            create = _memory(file, large)
            report = load(state, reader=reader, allow=allow, create=create, no_dist=True)
        yield Stored(state, report, tree(metadata))


def _memory(
    file: IO[bytes], items: dict[str, TensorStorageMetadata]
) -> Callable[[str, TensorStorageMetadata], torch.Tensor | None]:
    """Memory for tensors, in the pages of a file."""
    offsets: dict[str, int] = {}
    end = 0
    for key, item in items.items():
        count = item.size.numel() * item.properties.dtype.itemsize
        if count >= _SMALL_BYTES:
            offsets[key] = end
            end += -(-count // _ALIGNMENT) * _ALIGNMENT
    if not offsets:
        return lambda key, item: None
    # A page that the file system has no room for would end the process, when it is written to.
    os.posix_fallocate(file.fileno(), 0, end)
    storage = map_file(f"/proc/self/fd/{file.fileno()}", end, shared=True)

    def create(key: str, item: TensorStorageMetadata) -> torch.Tensor | None:
        if key not in offsets:
            return None
        return view(storage, offsets[key], item.size, item.properties.dtype)

    return create


def _shape_of(item: TensorStorageMetadata) -> torch.Tensor:
    return torch.empty(item.size, dtype=item.properties.dtype, device="meta")


def _put(state: dict[str, Any], place: Sequence[Any], value: torch.Tensor) -> None:
    node: Any = state
    for part in place[:-1]:
        if not isinstance(node, dict):
            return  # within a list, which holds no optimizer's state
        # Keys that were numbers are numbers again.
        part = next((key for key in node if str(key) == str(part)), part)
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
    if isinstance(node, dict):
        node[place[-1]] = value


class _Narrowed:
    """A reader with a part of the metadata."""

    def __init__(self, reader: DirectReader, metadata: Metadata) -> None:
        self._reader = reader
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)
