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
from typing import Any

__all__ = ["fork_safe_lock"]

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe_lock() -> threading.RLock:
    """Make a `threading.RLock` that is free in a forked child, unless the thread that forks holds
    it: then it does so there, too.

    Reentrant, since no other kind says who holds it; and because finalizers, which may run wherever
    the holder makes an object, then cannot wait for themselves.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _renew() -> None:
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()  # private, but what Python's own modules use


# Modules that do more in a child import this one before they say so: their locks are free by then.
os.register_at_fork(after_in_child=_renew)
