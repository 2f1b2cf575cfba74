"""Locks that a forked child can take, whoever held them in its parent.

A fork copies locks as they are, but of the threads only the one that forks: what another thread
held would stay locked in the child for ever. So locks of modules, and of objects that outlive a
call, are made here, and renewed here in a child. What they guard is for its owner to make good
there, if a thread that is gone could have left it half changed.
"""

from __future__ import annotations

import os
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["Latch", "fork_safe_lock"]

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe_lock() -> threading.RLock:
    """Make a `threading.RLock` that is free in a forked child. If the thread that forks holds it,
    that thread holds it in the child as well.

    Reentrant, since no other kind says who holds it; and because finalizers, which may run wherever
    the holder makes an object, then cannot wait for themselves.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


class Latch:
    """An event that happens once, and that a finalizer may set. `threading.Event` cannot be set
    there: the thread that the finalizer interrupts may hold the event's own lock."""

    def __init__(self) -> None:
        self.is_set = False
        self._wakes: SimpleQueue[None] = SimpleQueue()  # the one queue whose `put` is reentrant

    def set(self) -> None:
        """Wake all who wait, and who will."""
        self.is_set = True
        self._wakes.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when it has happened, or False after so many seconds in which it did not."""
        try:
            if not self.is_set:
                self._wakes.get(timeout=timeout)
        except Empty:
            pass
        finally:
            if self.is_set:
                self._wakes.put(None)  # for who else waits
        return self.is_set


def _renew() -> None:
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()  # private, but what Python's own modules use


# Modules that do more in a child import this one before they say so: their locks are free by then.
os.register_at_fork(after_in_child=_renew)
