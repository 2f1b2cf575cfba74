"""Where the files of a checkpoint are: in a directory, or in an object store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata

from pyckpt import _C
from pyckpt.engine import Engine
from pyckpt.format import metadata as metadata_format
from pyckpt.format.files import check_regular, open_regular, read_regular
from pyckpt.remote.folder import RemoteFolder

__all__ = ["Folder", "Job", "LocalFolder", "read_metadata"]


class Job(Protocol):
    """Reads ranges of files into memory, as ``_C.ReadJob`` does."""

    def add_tensor(
        self,
        file: int,
        offset: int,
        tensor: torch.Tensor,
        file_stride: Sequence[int] | None = None,
    ) -> int | None: ...
    def add_tensors(
        self, files: Sequence[int], offsets: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> list[int | None]: ...
    def add_buffer(self, file: int, offset: int, buffer: bytearray) -> int: ...
    def run(self) -> list[int]: ...
    def statistics(self) -> Any: ...


class LocalFolder:
    """A directory.

    Args:
        directory: of the checkpoint.
        engine: the memory and threads to read with.
        direct: as for `DirectReader`.
    """

    is_remote = False

    def __init__(
        self, directory: Path, engine: Engine, *, direct: Literal["auto", "require", "off"]
    ) -> None:
        self.directory = directory
        self._engine = engine
        self._direct: Literal["auto", "require", "off"] = direct

    def __str__(self) -> str:
        return str(self.directory)

    def path(self, name: str) -> str:
        """The path of a file."""
        return str(self.directory / name)

    def read(self, name: str, *, most: int) -> bytes:
        """A file as a whole.

        Raises:
            OSError: it cannot be read.
            CorruptCheckpoint: it is no regular file, or has more than ``most`` bytes.
        """
        path = self.directory / name
        with open_regular(path) as file:
            return read_regular(file, path, most=most)

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            OSError: there is none.
            CorruptCheckpoint: it is no regular file.
        """
        path = self.directory / name
        status = path.stat()
        check_regular(status, path)
        return status.st_size

    def job(self, *, checksum: bool) -> _C.ReadJob:
        """A job that reads files of this folder."""
        return _C.ReadJob(self._engine.native, direct=self._direct, checksum=checksum)

    def add(self, job: Any, name: str) -> int:
        """Open a file for a job; returns its number."""
        number: int = job.add_file(os.fsencode(self.directory / name))
        return number


Folder: TypeAlias = LocalFolder | RemoteFolder


def read_metadata(folder: Folder, name: str) -> Metadata:
    """Read and decode a ``.metadata`` file; raises as ``pyckpt.format.metadata.read``."""
    data = folder.read(name, most=metadata_format.SIZE_MAX)
    return metadata_format.decode(data, path=folder.path(name))
