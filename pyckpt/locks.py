"""Locks that a forked child can take, whichever thread of its parent held them.

A fork copies the locks in their present state, but only the thread that forks. A lock that another
thread held would stay locked in the child for ever. So locks of modules, and of objects that
outlive a call, are made here, and renewed in a child. If such a thread may have left guarded data
half changed, the owner of the data must correct it in the child.
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

    Reentrant, since no other kind of lock knows which thread holds it. And a finalizer may run
    wherever the holder makes an object, and must not wait for its own thread.
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
        """Wake all threads that wait, now or later."""
        self.is_set = True
        self._wakes.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Return True once it is set, or False if it is not set within ``timeout`` seconds."""
        try:
            if not self.is_set:
                self._wakes.get(timeout=timeout)
        except Empty:
            pass
        finally:
            if self.is_set:
                self._wakes.put(None)  # for other threads that wait
        return self.is_set


def _renew() -> None:
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()  # private, but what Python's own modules use


# Modules with their own handlers in a child import this one first, so that their locks are free by
# then.
os.register_at_fork(after_in_child=_renew)
