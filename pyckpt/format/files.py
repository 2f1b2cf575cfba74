"""Opens files safely in a checkpoint's directory, which other programs may have filled, and keeps
what is no file from being replaced by one."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from typing import Any

from pyckpt.errors import CorruptCheckpoint

__all__ = ["check_regular", "naming", "open_regular", "read_regular", "refuse_to_replace"]


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give the errors of calls that take a descriptor the path that they lack."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


class _Raw(FileIO):
    """A file whose EAGAIN is an error. Python takes it for the end of what a pipe has so far, and
    gives fewer bytes, or none; network file systems return it for files."""

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer)
        if count is None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return count


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file to read. Does not wait for the writer of a pipe.

    Raises:
        OSError: it cannot be opened.
        CorruptCheckpoint: it is a pipe, a device or a directory.
    """
    # With O_NONBLOCK a pipe without writers opens at once, and is then refused. The flag has no
    # effect on files.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        check_regular(os.fstat(descriptor), path)
        return BufferedReader(_Raw(descriptor, "rb"))
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(file: BufferedReader, path: str | os.PathLike[str], *, most: int) -> bytes:
    """Read a file that `open_regular` opened, as a whole.

    Raises:
        OSError: it cannot be read.
        CorruptCheckpoint: it has more than ``most`` bytes.
    """
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise CorruptCheckpoint(
            f"{os.fspath(path)} has {size} bytes, and no such file has more than {most}",
            path=os.fspath(path),
            expected=most,
            found=size,
        )
    return file.read(size)


def check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Check that ``path``, of the given status, is a regular file.

    Raises:
        CorruptCheckpoint: it is not.
    """
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpoint(f"{os.fspath(path)} is not a regular file", path=os.fspath(path))


def refuse_to_replace(path: str | os.PathLike[str]) -> None:
    """Check that a new file may take this name: there is nothing, or a regular file, or a link to
    one. A rename would put the file in the place of a device or a pipe, which other programs use.

    Raises:
        IsADirectoryError: there is a directory.
        FileExistsError: there is a device, a pipe or a socket.
        OSError: it cannot be looked at.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return  # also a link that leads nowhere, which leads to nothing that would be lost
    if not stat.S_ISREG(mode):
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EEXIST
        raise OSError(
            number, "this is no regular file, and is not replaced by one", os.fspath(path)
        )
