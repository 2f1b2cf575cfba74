"""Keeps saves of several processes into one directory from removing each other's files.

A commit removes the data files that it does not name, and another process may be writing one of
them. So a process claims its data file by a lock, from its making until the save is over, and
sweeps do not remove a claimed file. A sweep holds an exclusive ``turn`` of the directory, in which
no file is made, so that it never sees a file before its claim. On file systems without locks, both
do nothing.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pyckpt.format.flock import close_unwritten, trying
from pyckpt.locks import fork_safe_lock

__all__ = ["Claim", "is_claimed", "turn"]

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 60.0
_releasing = fork_safe_lock()  # held while a claim is released, which one thread may do at a time


class Claim:
    """Keeps other processes from removing a data file, until ``release`` or this object's end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = ExitStack()
        # NFS gives exclusive locks only to descriptors that can write.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._held.callback(close_unwritten, descriptor)
        self._held.enter_context(trying(descriptor))

    def release(self) -> None:
        """Release the lock. Idempotent, and any thread may call it. If an interrupt ends the call,
        the next one goes on."""
        held: ExitStack | None = self.__dict__.get("_held")
        if held is not None:
            with _releasing:
                held.close()

    def __del__(self) -> None:
        self.release()


def is_claimed(path: Path) -> bool:
    """Whether a save that is under way is writing a file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with trying(descriptor) as mine:
            return not mine
    finally:
        close_unwritten(descriptor)


@contextmanager
def turn(
    directory: Path,
    *,
    shared: bool = False,
    patience: float = _PATIENCE_SECONDS,
    doing: str = "committing a save",
) -> Iterator[None]:
    """Make data files (``shared``), or commit and sweep, while no other process does the other.

    Args:
        patience: how many seconds to wait for others at most.
        doing: what others do meanwhile, for the error.

    Raises:
        TimeoutError: another process has been in such a block for ``patience`` seconds.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + patience
        while True:
            with trying(descriptor, shared=shared) as mine:
                if mine:
                    yield
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"another process has been {doing} here for {patience:.0f} s; does it hang? "
                    "End it",
                    str(directory),
                )
            time.sleep(_POLL_SECONDS)
    finally:
        close_unwritten(descriptor)
