"""Python's cyclic garbage collector, while we make many objects at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold the collector off, in all threads.

    It runs when many objects were made, looks at all there are, and finds nothing: making the tens
    of thousands of small objects that describe a checkpoint took two to four times as long with it.
    Where two threads overlap in this, the collector is back when either of them leaves.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
