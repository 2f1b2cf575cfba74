"""``pyckpt.to_torch``: a checkpoint as one file for ``torch.load``."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch

from pyckpt.dcp.load import load_all
from pyckpt.dcp.objects import Allowed
from pyckpt.engine import Engine
from pyckpt.format.files import naming, refuse_to_replace
from pyckpt.remote.address import local_place_of

__all__ = ["to_torch", "write_torch"]


def to_torch(
    path: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    allow: Sequence[Allowed] = (),
    direct: Literal["auto", "require", "off"] = "auto",
    engine: Engine | None = None,
) -> None:
    """Write all that a checkpoint holds into one file, for ``torch.load``.

    The file holds the result of ``pyckpt.load(path)``, with whole tensors on the CPU, so all of it
    must fit into memory. The file takes its name when it is complete and on disk.

    Args:
        path: the checkpoint's directory.
        file: the file to write; one that is there is replaced, and nothing else is.
        allow: see `pyckpt.load`.
        direct: whether reading bypasses the page cache, as for `DirectReader`.
        engine: the memory and threads to use; by default those that everyone shares.

    Raises:
        FileExistsError, IsADirectoryError: ``file`` is there, and is no regular file.
        OSError: a file cannot be read or written.
        ValueError: ``file`` is a URL or empty.
        PyckptError: as `pyckpt.load`.
    """
    target = local_place_of(file, "file")
    refuse_to_replace(target)  # before the work, and once more after it
    write_torch(load_all(path, allow=allow, direct=direct, engine=engine), target)


def write_torch(state: Any, target: Path, *, like: Path | None = None) -> None:
    """``torch.save``, into a file that takes its name when it is complete and on disk.

    Args:
        like: a file whose permissions the new one gets, and its owner where this process may give
            files away; by default the file that is replaced, if there is one.

    Raises:
        OSError: it cannot be written.
    """
    shown = like or target
    found = shown.stat() if shown.exists() else None
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with naming(target):
            _write(state, descriptor)
        _permit(temporary, found)
        refuse_to_replace(target)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class _Output(io.BufferedWriter):
    """Knows why it could not write. torch's error, when it could not, does not say."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def _write(state: Any, descriptor: int) -> None:
    with _Output(io.FileIO(descriptor, "wb")) as output:
        try:
            torch.save(state, output)
        except RuntimeError:
            if output.failure is None:
                raise
        if output.failure is not None:
            raise output.failure
        output.flush()
        os.fsync(output.fileno())


def _permit(path: str, like: os.stat_result | None) -> None:
    """Give a file the owner and the permissions of another, or those of any new file."""
    if like is None:
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(path, 0o666 & ~mask)
        return
    with suppress(PermissionError):  # only root gives files away
        os.chown(path, like.st_uid, like.st_gid)
    os.chmod(path, like.st_mode & 0o777)
