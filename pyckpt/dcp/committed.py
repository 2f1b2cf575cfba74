"""The metadata of a committed checkpoint, which is read from its file when somebody looks at it.

DCP sends the metadata of every save to all ranks, and returns it there. It describes every tensor,
and few programs look at it. So its large parts are mappings that are sent as the file's name alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from pyckpt.format.metadata import SIZE_MAX, decode, read
from pyckpt.remote.address import is_url
from pyckpt.remote.folder import RemoteFolder

__all__ = ["look_up", "refer_to_file"]

_Part = Literal["state_dict_metadata", "planner_data", "storage_data"]


class _File:
    """A ``.metadata`` file, or object, read when it is first looked at. Pickles as its name."""

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def metadata(self) -> Metadata:
        if not is_url(self.path):
            return read(self.path)
        folder, _, name = self.path.rpartition("/")
        data = RemoteFolder(folder).read(name, most=SIZE_MAX)
        return decode(data, path=self.path)

    def __reduce__(self) -> Any:
        return _File, (self.path,)


class CommittedPart(Mapping[Any, Any]):
    """One of the mappings that a ``.metadata`` file holds.

    Args:
        file: where it is read from.
        part: its name among the fields of `Metadata`.
        known: the mapping, if this process has it anyway. It is not sent to other processes.
    """

    def __init__(self, file: _File, part: _Part, known: Mapping[Any, Any] | None = None) -> None:
        self._file = file
        self._part = part
        self._known = known

    @property
    def _entries(self) -> Mapping[Any, Any]:
        if self._known is None:
            self._known = getattr(self._file.metadata, self._part) or {}
        return self._known

    def __getitem__(self, key: Any) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __repr__(self) -> str:
        return repr(self._entries)

    def __reduce__(self) -> Any:
        return CommittedPart, (self._file, self._part)


def look_up(metadata: Metadata) -> None:
    """Put the mappings that metadata refers to into the metadata, so that it can be saved again."""
    described: Any = metadata
    for part in ("state_dict_metadata", "planner_data"):  # each save makes the rest anew
        value = getattr(metadata, part)
        if isinstance(value, CommittedPart):
            setattr(described, part, dict(value))


def refer_to_file(metadata: Metadata, path: str | os.PathLike[str]) -> None:
    """Replace the large parts of a save's metadata by references to the file that was committed."""
    file = _File(os.fspath(path))
    described: Any = metadata
    described.state_dict_metadata = CommittedPart(
        file, "state_dict_metadata", metadata.state_dict_metadata
    )
    if isinstance(metadata.planner_data, dict):
        described.planner_data = CommittedPart(file, "planner_data", metadata.planner_data)
    described.storage_data = CommittedPart(file, "storage_data")
