"""Synchronisations and copies of a report, by range, thread and API call."""

from __future__ import annotations

import difflib
import math
import os
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyckpt.profiling.nsys import database as db
from pyckpt.profiling.nsys.activities import (
    UNKNOWN,
    Call,
    Copy,
    WaitKind,
    by_correlation,
    by_thread,
    kind_of,
    read_calls,
    read_copies,
    read_waits,
)
from pyckpt.profiling.nsys.ranges import Span, enclosing, read_spans


@dataclass(frozen=True)
class RangeInfo:
    """An NVTX range, by its name."""

    instances: int
    seconds: float
    """Duration of all instances, without those that were open when recording ended."""
    open: int
    """Instances that were open then. They last until the end of the report."""


@dataclass(frozen=True)
class SyncRow:
    """Calls by which a thread waited for the device."""

    thread: str
    api: str
    """The CUDA function, of the runtime or the driver, without its version."""
    kind: WaitKind
    """What the thread waited for. ``"copy"``: a call that is synchronous by itself
    (``cudaMemcpy``)."""
    count: int
    seconds: float
    """Time spent in the calls."""


@dataclass(frozen=True)
class CopyRow:
    """Copies of one thread, API call, direction and kinds of memory."""

    thread: str
    """The thread that called."""
    api: str
    direction: str
    """``"d2h"``, ``"h2d"``, ``"d2d"``, ``"p2p"``, ``"uvm_d2h"``, ..."""
    source: str
    """Kind of memory: ``"pageable"``, ``"pinned"``, ``"device"``, ``"managed"``, ..."""
    destination: str
    count: int
    bytes: int
    seconds: float
    """Time on the device, summed."""


@dataclass(frozen=True)
class Totals:
    """Counts, bytes and seconds of a range, or of a whole report."""

    instances: int
    stream_syncs: int
    device_syncs: int
    event_syncs: int
    blocking_copy_calls: int
    """Calls of copies that are synchronous by themselves (``cudaMemcpy``). PyTorch's own blocking
    copies are asynchronous ones, each followed by a stream synchronisation."""
    waited_seconds: float
    """Time that the host spent in all of these waits."""
    d2h_copies: int
    d2h_bytes: int
    h2d_copies: int
    h2d_bytes: int

    @property
    def syncs(self) -> int:
        """Stream, device and event synchronisations."""
        return self.stream_syncs + self.device_syncs + self.event_syncs


class Report:
    """The content of a report. It keeps no file open.

    A call belongs to every range in which it begins: push/pop ranges of its own thread, and
    start/end ranges of its process. ``range=None`` in the methods means the whole report.
    """

    def __init__(self, database: db.Database, path: Path) -> None:
        self.path = path
        self.version = database.metadata("EXPORT_PRODUCT_VERSION")
        """The version of nsys; None if the export does not have it."""
        self.notes = _notes(database)
        """Data that the report lacks, and why."""
        spans = read_spans(database)
        self.ranges = _range_infos(spans)
        self._names = _thread_names(database)
        self._syncs: dict[str | None, dict[tuple[str, str, WaitKind], list[int]]]
        self._syncs = defaultdict(dict)
        self._copies: dict[str | None, dict[tuple[str, str, str, str, str], list[int]]]
        self._copies = defaultdict(dict)
        self._collect(database, spans)

    def syncs(self, *, range: str | None = None) -> list[SyncRow]:
        """The host's waits, most frequent first.

        Raises:
            ValueError: no range has this name; also in the methods below.
        """
        self._check(range)
        rows = [
            SyncRow(thread, api, kind, count, nanoseconds / 1e9)
            for (thread, api, kind), (count, nanoseconds) in self._syncs.get(range, {}).items()
        ]
        return sorted(rows, key=lambda row: (-row.count, row.thread, row.api))

    def copies(self, *, range: str | None = None) -> list[CopyRow]:
        """The copies, most frequent first."""
        self._check(range)
        rows = [
            CopyRow(*key, count=count, bytes=size, seconds=nanoseconds / 1e9)
            for key, (count, size, nanoseconds) in self._copies.get(range, {}).items()
        ]
        return sorted(rows, key=lambda row: (-row.count, row.direction, row.thread, row.api))

    def totals(self, *, range: str | None = None) -> Totals:
        """The totals of synchronisations and copies."""
        syncs, copies = self.syncs(range=range), self.copies(range=range)

        def waits(kind: WaitKind) -> int:
            return sum(row.count for row in syncs if row.kind == kind)

        d2h = [row for row in copies if row.direction == "d2h"]
        h2d = [row for row in copies if row.direction == "h2d"]
        return Totals(
            instances=1 if range is None else self.ranges[range].instances,
            stream_syncs=waits("stream"),
            device_syncs=waits("device"),
            event_syncs=waits("event"),
            blocking_copy_calls=waits("copy"),
            waited_seconds=sum(row.seconds for row in syncs),
            d2h_copies=sum(row.count for row in d2h),
            d2h_bytes=sum(row.bytes for row in d2h),
            h2d_copies=sum(row.count for row in h2d),
            h2d_bytes=sum(row.bytes for row in h2d),
        )

    def as_dict(self, *, range: str | None = None) -> dict[str, Any]:
        """All of it, in a form for JSON. ``ranges`` has the totals of each range, or of one."""
        self._check(range)
        names = self.ranges if range is None else [range]
        return {
            "report": str(self.path),
            "nsys": self.version,
            "notes": list(self.notes),
            "range": range,
            "totals": asdict(self.totals(range=range)),
            "ranges": {
                name: {**asdict(self.ranges[name]), "totals": asdict(self.totals(range=name))}
                for name in names
            },
            "syncs": [asdict(row) for row in self.syncs(range=range)],
            "copies": [asdict(row) for row in self.copies(range=range)],
        }

    def _check(self, range: str | None) -> None:
        if range is None or range in self.ranges:
            return
        similar = difflib.get_close_matches(range, self.ranges, n=3)
        hint = f"; there is {', '.join(map(repr, similar))}" if similar else ""
        raise ValueError(f"{self.path}: no NVTX range is called {range!r}{hint}")

    # --- reading ------------------------------------------------------------------------------

    def _collect(self, database: db.Database, spans: list[Span]) -> None:
        calls = read_calls(database)
        led_by = by_correlation(calls)
        waits = read_waits(database)
        copies = read_copies(database)

        matched: dict[Call, list[Copy]] = defaultdict(list)
        for key, group in copies.items():
            call = led_by.get(key)
            if call is None:
                for copy in group:
                    self._add_copy(None, UNKNOWN, UNKNOWN, copy)
            else:
                matched[call] += group
        activities: dict[Call, WaitKind] = {}
        for key, kinds in waits.items():
            call = led_by.get(key)
            if call is not None:
                activities[call] = kinds[0][0]
                continue
            for kind, nanoseconds in kinds:
                self._add_wait(None, (UNKNOWN, UNKNOWN, kind), nanoseconds)

        for thread_calls in by_thread(calls).values():
            first = thread_calls[0]
            own = [
                span
                for span in spans
                if (
                    span.process == first.process
                    if span.thread is None
                    else span.thread == first.thread
                )
            ]
            thread = self._thread_name(first.thread)
            outer_end = -1.0
            for call, names in enclosing(thread_calls, own):
                scopes: list[str | None] = [None, *names]
                for copy in matched.get(call, ()):
                    for scope in scopes:
                        self._add_copy(scope, thread, call.api, copy)
                wait = kind_of(call, activities.get(call), matched.get(call))
                # The runtime waits by a call of the driver, which may be in the report as well.
                if wait is None or call.end <= outer_end:
                    continue
                outer_end = call.end
                for scope in scopes:
                    self._add_wait(scope, (thread, call.api, wait), call.end - call.start)

    def _add_wait(
        self, scope: str | None, key: tuple[str, str, WaitKind], nanoseconds: int
    ) -> None:
        entry = self._syncs[scope].setdefault(key, [0, 0])
        entry[0] += 1
        entry[1] += nanoseconds

    def _add_copy(self, scope: str | None, thread: str, api: str, copy: Copy) -> None:
        key = (thread, api, copy.direction, copy.source, copy.destination)
        entry = self._copies[scope].setdefault(key, [0, 0, 0])
        entry[0] += 1
        entry[1] += copy.bytes
        entry[2] += copy.nanoseconds

    def _thread_name(self, thread: int | None) -> str:
        if thread is None:
            return UNKNOWN
        return f"{self._names.get(thread, 'thread')} {thread & 0xFFFFFF}"


def read(path: str | os.PathLike[str]) -> Report:
    """Read a report: an SQLite export, or an ``.nsys-rep``, which nsys then exports.

    Raises:
        FileNotFoundError: there is no such file, or it is an ``.nsys-rep`` and nsys is not
            installed.
        ValueError: it is no export of nsys, or nsys cannot export it.
    """
    path = Path(path)
    with db.opened(path) as database:
        return Report(database, path)


def _notes(database: db.Database) -> tuple[str, ...]:
    notes = []
    if not database.has(db.CALLS):
        notes.append(
            "the report has no CUDA API calls: no thread or range can be told "
            "(none was made, or it was recorded without --trace=cuda)"
        )
    if not database.has(db.NVTX):
        notes.append("the report has no NVTX ranges")
    return tuple(notes)


def _range_infos(spans: list[Span]) -> dict[str, RangeInfo]:
    groups: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        groups[span.name].append(span)
    return {
        name: RangeInfo(
            instances=len(group),
            seconds=sum(s.end - s.start for s in group if s.end != math.inf) / 1e9,
            open=sum(s.end == math.inf for s in group),
        )
        for name, group in groups.items()
    }


def _thread_names(database: db.Database) -> dict[int, str]:
    rows = list(database.rows("ThreadNames", ("globalTid", "nameId")))
    strings = database.strings({name for _, name in rows})
    return {thread: strings[name] for thread, name in rows if name in strings}
