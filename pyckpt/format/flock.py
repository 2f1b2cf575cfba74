"""Advisory file locks between processes, and between machines if the file system supports them."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["trying"]

_logger = logging.getLogger("pyckpt")


@contextmanager
def trying(descriptor: int, *, shared: bool = False) -> Iterator[bool]:
    """Lock an open file while the block runs. Yields False if another process holds the lock. Does
    not wait.

    Yields True if the file system has no locks. The lock ends with the process that holds it, or
    with the last process that was forked meanwhile. NFS gives exclusive locks only to descriptors
    that can write.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    held = mine = True
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        held = mine = False
    except OSError as error:
        _logger.debug("no file locks here: %s", error)
        held = False
    try:
        yield mine
    finally:
        if held:
            # Closing the descriptor is not enough: a process forked meanwhile also has it.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
