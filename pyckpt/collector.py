"""Pauses Python's cyclic garbage collector while pyckpt makes many objects at once.

The collector runs when many objects were made, visits all of them, and finds none to free.
Describing a checkpoint makes tens of thousands of small objects, and took two to four times as long
with the collector.

When the last pause ends, the collector begins by visiting all objects that were made since the
first pause began. So code that ends a pause should first drop the objects that it no longer needs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pyckpt.locks import fork_safe_lock

__all__ = ["CollectorPause", "collector_paused"]

# Reentrant: a finalizer may end a pause, and may run wherever the collector runs.
_lock = fork_safe_lock()
_pauses: set[CollectorPause] = set()
_was_enabled = False


class CollectorPause:
    """Keeps the collector off, in all threads, until its ``end``. Pauses may overlap. If the
    collector was on before the first, it is on again after the last."""

    def __init__(self) -> None:
        global _was_enabled
        with _lock:
            if not _pauses:
                _was_enabled = gc.isenabled()
                gc.disable()
            _pauses.add(self)

    def end(self) -> None:
        """End the pause. Idempotent."""
        with _lock:
            if self not in _pauses:
                return
            _pauses.remove(self)
            if not _pauses and _was_enabled:
                gc.enable()


@contextmanager
def collector_paused() -> Iterator[None]:
    """A `CollectorPause`, as a block."""
    pause = CollectorPause()
    try:
        yield
    finally:
        pause.end()


def _after_fork() -> None:
    # The threads that would end them may be the parent's.
    for pause in list(_pauses):
        pause.end()


os.register_at_fork(after_in_child=_after_fork)
