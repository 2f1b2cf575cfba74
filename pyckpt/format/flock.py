"""Advisory locks of files, between processes and, where the file system has them, machines."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["trying"]

_logger = logging.getLogger("pyckpt")


@contextmanager
def trying(descriptor: int, *, shared: bool = False) -> Iterator[bool]:
    """Lock an open file while the block runs; False where another holds it. Does not wait.

    True also where the file system has no locks. The lock goes with the process that holds it, or
    with the last of those that were forked while it was held. NFS gives exclusive locks for
    descriptors only that could write.
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
            # Not left to the descriptor's end: a process that was forked meanwhile has it, too.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
