"""NVTX ranges, and the ranges to which a call belongs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pyckpt.profiling.nsys.database import NVTX, Database


@dataclass(frozen=True)
class Span:
    """One range. Times are nanoseconds."""

    name: str
    start: int
    end: float
    """Infinite, if the range was still open when recording ended."""
    process: int | None
    thread: int | None
    """None for a range of the process: one thread may call ``nvtxRangeStart``, and another
    ``nvtxRangeEnd``."""


class Timed(Protocol):
    @property
    def start(self) -> int: ...


T = TypeVar("T", bound=Timed)


def process_of(global_id: int | None) -> int | None:
    """The process of a packed id of nsys: its lowest 24 bits are the thread, the next 24 the
    process."""
    return None if global_id is None else global_id >> 24


def read_spans(database: Database) -> list[Span]:
    kinds = database.enumeration("ENUM_NSYS_EVENT_TYPE")
    columns = ("eventType", "start", "end", "text", "textId", "globalTid", "domainId")
    rows = list(database.rows(NVTX, columns))
    strings = database.strings({row[4] for row in rows if row[4] is not None})

    def name_of(text: str | None, text_id: int | None) -> str:
        if text is None and text_id is not None:
            text = strings.get(text_id)
        return "(unnamed)" if text is None else text

    domains = {
        (process_of(thread), domain): name_of(text, text_id)
        for kind, _, _, text, text_id, thread, domain in rows
        if kinds.get(kind) == "NvtxDomainCreate"
    }
    spans = []
    for kind, start, end, text, text_id, thread, domain in rows:
        if kinds.get(kind) not in ("NvtxPushPopRange", "NvtxStartEndRange"):
            continue
        process = process_of(thread)
        name = name_of(text, text_id)
        if (process, domain) in domains:
            name = f"{domains[process, domain]}:{name}"
        of_thread = kinds[kind] == "NvtxPushPopRange"
        spans.append(
            Span(
                name,
                start,
                math.inf if end is None else end,
                process,
                thread if of_thread else None,
            )
        )
    return sorted(spans, key=lambda span: span.start)


def enclosing(calls: Iterable[T], spans: Sequence[Span]) -> Iterator[tuple[T, frozenset[str]]]:
    """Each call with the names of the ranges in which it begins; both in order of their start.

    Ranges may nest and overlap: a call is in all that are open, once for each name.
    """
    open_spans: list[tuple[float, str]] = []
    at = 0
    for call in calls:
        while at < len(spans) and spans[at].start <= call.start:
            heapq.heappush(open_spans, (spans[at].end, spans[at].name))
            at += 1
        while open_spans and open_spans[0][0] <= call.start:
            heapq.heappop(open_spans)
        yield call, frozenset(name for _, name in open_spans)
