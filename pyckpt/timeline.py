"""Named ranges of Python threads, in recordings and in the timelines of Nsight Systems.

For Nsight and other tools the ranges are NVTX ranges of the domain "pyckpt", with bytes as their
payload, if the package ``nvtx`` is there (``pip install pyckpt[nvtx]``). For recordings
(`pyckpt.record_timeline`) they are kept in a list. The engine's native threads mark and record
their own ranges (csrc/timeline.h). Without a tool and a recording, a range does nothing.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

try:
    import nvtx
except ImportError:
    nvtx = None

__all__ = ["Range", "keep_ranges", "named"]

_NOTHING: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class Range:
    """A range that has ended."""

    thread: int
    """Its number in the kernel."""
    thread_name: str
    name: str
    begin_ns: int
    """Of ``time.monotonic_ns``, as `end_ns`."""
    end_ns: int
    bytes: int | None


_kept: list[Range] | None = None  # while a recording runs


def keep_ranges(ranges: list[Range] | None) -> None:
    """From now on, add each range that begins to this list when it ends; None: to none."""
    global _kept
    _kept = ranges


def named(name: str, payload: int | None = None) -> AbstractContextManager[Any]:
    """A range of the calling thread. ``payload`` is in bytes."""
    ranged: AbstractContextManager[Any] = _NOTHING
    if nvtx is not None:
        ranged = nvtx.annotate(name, domain="pyckpt", payload=payload)
    kept = _kept  # another thread may end the recording
    return ranged if kept is None else _Kept(name, payload, ranged, kept)


class _Kept:
    """A range that a list gets. If the recording ends before it, nobody looks at the list."""

    def __init__(
        self,
        name: str,
        payload: int | None,
        inner: AbstractContextManager[Any],
        ranges: list[Range],
    ) -> None:
        self._name = name
        self._bytes = payload
        self._inner = inner
        self._ranges = ranges
        self._begin = 0

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._begin = time.monotonic_ns()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end = time.monotonic_ns()
        thread = threading.get_native_id()
        called = threading.current_thread().name
        self._ranges.append(Range(thread, called, self._name, self._begin, end, self._bytes))
        self._inner.__exit__(exc_type, exc, traceback)
