"""Advisory file locks between processes, and between machines if the file system supports them."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["close_unwritten", "trying"]

_logger = logging.getLogger("pyckpt")


def close_unwritten(descriptor: int) -> None:
    """Close a descriptor through which this process has written nothing: of a lock, or to read.

    An error of ``close`` is news of earlier writes. Here there were none, and Linux closes whatever
    it returns, so an error must not undo what was done meanwhile, such as a commit.
    """
    try:
        os.close(descriptor)
    except OSError as error:
        _logger.debug("closing what was not written to: %s", error)


@contextmanager
def trying(descriptor: int, *, shared: bool = False, strict: bool = False) -> Iterator[bool]:
    """Lock an open file while the block runs. Yields False if another process holds the lock. Does
    not wait.

    Yields True if the file system has no locks, and False with ``strict``. The lock ends with the
    process that holds it, or with the last process that was forked meanwhile. NFS gives
    exclusive locks only to descriptors that can write.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    held = mine = True
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        held = mine = False
    except OSError as error:
        _logger.debug("no file locks here: %s", error)
        held, mine = False, not strict
    try:
        yield mine
    finally:
        if held:
            # Closing the descriptor is not enough: a process forked meanwhile also has it.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
