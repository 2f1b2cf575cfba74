"""Removes a checkpoint, in an order that can be interrupted anywhere.

First the metadata gets another name, durably. From then on no reader takes the directory for a
checkpoint. Then the data files are removed, durably, and the renamed metadata last. So the remains
of an interrupted removal can be recognised, and are removed later. Removing uses descriptors of
directories and follows no links, so that it removes nothing outside of the checkpoint.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from pyckpt.format import commit
from pyckpt.format.flock import close_unwritten, trying

__all__ = ["remove"]


def remove(
    path: Path,
    *,
    beginning: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True),
    remains: bool = False,
) -> bool:
    """Remove a checkpoint, or go on with a removal that was interrupted.

    Args:
        beginning: a block in which the metadata gets its other name. If it yields False, the
            checkpoint stays.
        remains: whether the directory should have no metadata. If it has, it stays.

    Returns:
        False if nothing was done: a process is reading it (``catalog.reading``), it is a link to
        another directory, or ``beginning`` or ``remains`` forbade it.

    Raises:
        OSError: a file could not be removed. Unless the first step failed, the remains are no valid
            checkpoint.
    """
    with ExitStack() as opened:
        parent = opened.enter_context(_opened(path.parent))
        try:
            folder = opened.enter_context(_opened(path.name, within=parent))
        except NotADirectoryError:  # a link
            return False
        with beginning() as may:
            if not may or not _invalidate(folder, path, remains=remains):
                return False
            # Files that appear from here on belong to a new save.
            names = os.listdir(folder)
        # Without these, data files are a checkpoint that has lost its metadata. btrfs does not list
        # what was renamed since the directory was opened.
        last = {commit.REMOVED, *filter(commit.is_mark, names)}
        others = [name for name in names if name not in last]
        for name in others:
            _remove(name, folder)
        if others:
            # After a power failure, the data must not be back while these are gone.
            commit.sync_opened_directory(folder, path)
        for name in last:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        try:
            os.rmdir(path.name, dir_fd=parent)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
    return True


@contextmanager
def _opened(path: str | Path, *, within: int | None = None) -> Iterator[int]:
    """A descriptor of a directory; of one ``within`` another only if it is no link.

    Raises:
        NotADirectoryError: it is a link, or no directory.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if within is not None:
        flags |= os.O_NOFOLLOW
    descriptor = os.open(path, flags, dir_fd=within)
    try:
        yield descriptor
    finally:
        close_unwritten(descriptor)


def _invalidate(folder: int, path: Path, *, remains: bool) -> bool:
    """Give the metadata its other name; False if it is to stay."""
    name = commit.metadata_name()
    try:
        # NFS gives exclusive locks only to descriptors that can write.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return True
    try:
        with trying(descriptor) as mine:
            if remains or not mine:
                return False
            os.rename(name, commit.REMOVED, src_dir_fd=folder, dst_dir_fd=folder)
            # Before any data is removed: after a power failure, the metadata must not be back
            # while data is missing.
            commit.sync_opened_directory(folder, path)
    finally:
        close_unwritten(descriptor)
    return True


def _remove(name: str, folder: int) -> None:
    """Remove a file, a link, or a directory with its content."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        with _opened(name, within=folder) as inner:
            for entry in os.listdir(inner):
                _remove(entry, inner)
        os.rmdir(name, dir_fd=folder)
