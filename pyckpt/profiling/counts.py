"""The counts of `count_syncs`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from traceback import StackSummary
from typing import Any, Literal

from pyckpt.locks import fork_safe_lock

__all__ = ["CopyCounts", "Kind", "SyncCounts", "ThreadCounts"]

Kind = Literal[
    "stream_sync",
    "device_sync",
    "event_sync",
    "item",
    "blocking_copy",
    "nonblocking_copy",
    "data_dependent",
]
Direction = Literal["d2h", "h2d"]
HostMemory = Literal["pageable", "pinned", "unknown"]

WAITS: tuple[tuple[Kind, str], ...] = (
    ("stream_sync", "stream synchronisations"),
    ("device_sync", "device synchronisations"),
    ("event_sync", "event synchronisations"),
    ("item", "reads of a scalar (.item())"),
    ("blocking_copy", "blocking copies"),
    ("data_dependent", "operators with results that the host reads"),
)


@dataclass(frozen=True)
class CopyCounts:
    """Copies between host and device of one direction, memory and blocking."""

    direction: Direction
    """``"d2h"``, device to host, or ``"h2d"``, host to device."""
    host_memory: HostMemory
    """Memory of the host's tensor. ``"unknown"`` for fake tensors, and for ``.item()``, which uses
    torch's own memory."""
    blocking: bool
    """Whether torch waited for the copy: it was not issued with ``non_blocking=True``. CUDA may
    make the host wait for a copy of pageable memory nevertheless."""
    count: int
    bytes: int


class _Readings(ABC):
    """Sums over the counts of one thread, or of all threads."""

    @abstractmethod
    def _threads(self) -> Iterable[ThreadCounts]:
        """The counts to add up."""

    def count(self, kind: Kind) -> int:
        """How often ``kind`` was seen."""
        return sum(thread._events[kind] for thread in self._threads())

    @property
    def stream_syncs(self) -> int:
        """Calls of torch that wait for a stream: the stream's ``synchronize()``, blocking copies
        and ``.item()``. Needs the real device."""
        return self.count("stream_sync")

    @property
    def device_syncs(self) -> int:
        """Calls of torch that wait for a device. Needs the real device."""
        return self.count("device_sync")

    @property
    def event_syncs(self) -> int:
        """Calls of torch that wait for an event. Needs the real device."""
        return self.count("event_sync")

    @property
    def items(self) -> int:
        """Reads of a scalar on the device: ``.item()``, ``float(t)``, ``if t:``, ``tolist()``."""
        return self.count("item")

    @property
    def blocking_copies(self) -> int:
        """Copies between host and device that were not asked to be ``non_blocking``."""
        return self.count("blocking_copy")

    @property
    def data_dependent(self) -> int:
        """Operators, other than reads of a scalar, for which the host must read the result, or its
        shape, from the device: ``nonzero``, ``unique``, ``equal``, indexing with a mask."""
        return self.count("data_dependent")

    @property
    def total(self) -> int:
        """How often the host waited for the device, each wait counted once.

        On a real device these are the synchronisations that torch reported; an ``.item()`` is one
        stream synchronisation. On fake tensors they are the reads, blocking copies and
        data-dependent operators that would wait.
        """
        return (
            self.stream_syncs
            + self.device_syncs
            + self.event_syncs
            + sum(thread._unreported for thread in self._threads())
        )

    @property
    def copies(self) -> tuple[CopyCounts, ...]:
        """Copies between host and device, by direction, memory and blocking; and ``.item()``."""
        merged: dict[tuple[Direction, HostMemory, bool], list[int]] = {}
        for thread in self._threads():
            # Other threads may add to their counts meanwhile: list() takes all items at once.
            for key, (count, size) in list(thread._copies.items()):
                entry = merged.setdefault(key, [0, 0])
                entry[0] += count
                entry[1] += size
        return tuple(CopyCounts(*key, *entry) for key, entry in sorted(merged.items()))

    @property
    def d2h_copies(self) -> int:
        """Copies from device to host, ``.item()`` included."""
        return sum(copies.count for copies in self.copies if copies.direction == "d2h")

    @property
    def d2h_bytes(self) -> int:
        return sum(copies.bytes for copies in self.copies if copies.direction == "d2h")

    @property
    def h2d_copies(self) -> int:
        """Copies from host to device."""
        return sum(copies.count for copies in self.copies if copies.direction == "h2d")

    @property
    def h2d_bytes(self) -> int:
        return sum(copies.bytes for copies in self.copies if copies.direction == "h2d")

    def as_dict(self) -> dict[str, Any]:
        """All counts, in a form for JSON."""
        return {
            "total": self.total,
            "stream_syncs": self.stream_syncs,
            "device_syncs": self.device_syncs,
            "event_syncs": self.event_syncs,
            "items": self.items,
            "blocking_copies": self.blocking_copies,
            "data_dependent": self.data_dependent,
            "copies": [vars(copies).copy() for copies in self.copies],
        }


class ThreadCounts(_Readings):
    """The counts of one thread. Only that thread writes; any thread may read."""

    def __init__(self, name: str, ident: int) -> None:
        self.name = name
        """Python's name of the thread; ``native-<ident>`` if Python did not start it."""
        self.ident = ident
        self._events: Counter[Kind] = Counter()
        self._copies: dict[tuple[Direction, HostMemory, bool], list[int]] = {}
        self._unreported = 0

    def _threads(self) -> Iterable[ThreadCounts]:
        return (self,)

    def _add_copy(
        self, direction: Direction, memory: HostMemory, blocking: bool, size: int
    ) -> None:
        entry = self._copies.setdefault((direction, memory, blocking), [0, 0])
        entry[0] += 1
        entry[1] += size


class SyncCounts(_Readings):
    """The counts of `count_syncs`. They grow inside of the ``with`` block, and stay after it."""

    def __init__(self, *, reported: bool) -> None:
        self.reported = reported
        """Whether torch reports its synchronisations here. If not (a torch without GPU traces),
        `total` counts operators, as for fake tensors."""
        self._stacks: dict[Kind, StackSummary] = {}
        self._all: list[ThreadCounts] = []
        self._lock = fork_safe_lock()
        self._own = threading.local()
        self._foreign: dict[int, ThreadCounts] = {}

    def _threads(self) -> Iterable[ThreadCounts]:
        return tuple(self._all)

    @property
    def by_thread(self) -> tuple[ThreadCounts, ...]:
        """The counts of each thread that has any, in the order of their first entries."""
        return tuple(self._all)

    @property
    def stacks(self) -> Mapping[Kind, StackSummary]:
        """The Python stack of the first wait of each kind, outermost call first, from the ``with``
        on; empty without ``stacks=True``. A thread that runs no Python, such as autograd's, has no
        stack."""
        return dict(self._stacks)

    def _of_this_thread(self) -> ThreadCounts:
        try:
            own: ThreadCounts = self._own.counts
        except AttributeError:
            pass
        else:
            return own
        ident = threading.get_ident()
        name = next((t.name for t in threading.enumerate() if t.ident == ident), None)
        with self._lock:
            if name is None:
                # A native thread may get a new thread state, with empty thread-locals, each time
                # it enters Python.
                counts = self._foreign.get(ident)
                if counts is None:
                    counts = self._foreign[ident] = ThreadCounts(f"native-{ident}", ident)
                    self._all.append(counts)
                return counts
            counts = self._own.counts = ThreadCounts(name, ident)
            self._all.append(counts)
            return counts

    def __str__(self) -> str:
        lines = [f"the host waited {self.total} times for the device"]
        lines += [f"  {self.count(kind):6} {what}" for kind, what in WAITS if self.count(kind)]
        for copies in self.copies:
            way = "device to host" if copies.direction == "d2h" else "host to device"
            how = "blocking" if copies.blocking else "non-blocking"
            memory = "" if copies.host_memory == "unknown" else f", {copies.host_memory}"
            lines.append(f"  {copies.count:6} copies {way}, {how}{memory}: {copies.bytes:,} bytes")
        if len(self._all) > 1:
            lines += [f"  {thread.total:6} in thread {thread.name}" for thread in self._all]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<SyncCounts total={self.total}>"
