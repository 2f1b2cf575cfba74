"""How a checkpoint goes, in an order that can be interrupted anywhere.

First the metadata gets another name, durably; from then on nothing takes the directory for a
checkpoint. Then the data goes, and the renamed metadata last. So what an interruption leaves behind
can be told from everything else, and is removed later. Removing goes by descriptors of directories
and follows no links, so that it removes nothing elsewhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from pyckpt.format import commit
from pyckpt.format.flock import trying

__all__ = ["remove"]


def remove(
    path: Path,
    *,
    beginning: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True),
    remains: bool = False,
) -> bool:
    """Remove a checkpoint, or go on with a removal that was interrupted.

    Args:
        beginning: a block in which the metadata gets its other name; False says that it is to stay
            after all.
        remains: whether the directory has no metadata; it is left alone if it has.

    Returns:
        False where nothing was done because someone is reading it (``catalog.reading``), because
        it is a link to a directory elsewhere, or because ``beginning`` or ``remains`` said so.

    Raises:
        OSError: something could not be removed; what is left is no valid checkpoint any more,
            unless it was the first step that failed.
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
            # What comes into the directory from here on is of a save that goes on.
            names = os.listdir(folder)
        for name in names:
            if name != commit.REMOVED:
                _remove(name, folder)
        with suppress(FileNotFoundError):
            os.unlink(commit.REMOVED, dir_fd=folder)
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
        NotADirectoryError: it is something else.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if within is not None:
        flags |= os.O_NOFOLLOW
    descriptor = os.open(path, flags, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _invalidate(folder: int, path: Path, *, remains: bool) -> bool:
    """Give the metadata its other name; False where it is to stay."""
    name = commit.metadata_name()
    try:
        # NFS gives exclusive locks to those only who could write.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return True
    try:
        with trying(descriptor) as mine:
            if remains or not mine:
                return False
            os.rename(name, commit.REMOVED, src_dir_fd=folder, dst_dir_fd=folder)
            # Before any data goes: a power failure must not bring the metadata back without it.
            commit.sync_opened_directory(folder, path)
    finally:
        os.close(descriptor)
    return True


def _remove(name: str, folder: int) -> None:
    """Remove a file, a link, or a directory with all that is in it."""
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
