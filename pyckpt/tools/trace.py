"""Chrome traces, such as `pyckpt.record_timeline` writes: reading them, and summing them up."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Row", "Span", "Thread", "Trace", "read_traces"]


@dataclass(frozen=True)
class Thread:
    """A thread, by its number in the kernel and its process's."""

    process: int
    number: int


@dataclass(frozen=True)
class Span:
    """Something that a thread did."""

    thread: Thread
    name: str
    begin: float
    """Seconds since the begin of the first span of the trace."""
    seconds: float
    bytes: int
    """0 if it is not known."""

    @property
    def end(self) -> float:
        return self.begin + self.seconds


@dataclass(frozen=True)
class Row:
    """All spans of one name in the threads of one kind, which differ in their number alone."""

    threads: str
    name: str
    count: int
    seconds: float
    """Summed over the threads."""
    bytes: int


@dataclass(frozen=True)
class Trace:
    """What threads did, in the order in which it began."""

    spans: tuple[Span, ...]
    thread_names: dict[Thread, str]
    process_names: dict[int, str]

    @property
    def seconds(self) -> float:
        """From the begin of the first span to the end of the last."""
        return max((span.end for span in self.spans), default=0.0)

    def threads(self) -> list[Thread]:
        """The threads that did something, by process and by name."""
        return sorted(
            {span.thread for span in self.spans},
            key=lambda thread: (thread.process, *_natural(self.name_of(thread)), thread.number),
        )

    def name_of(self, thread: Thread) -> str:
        return self.thread_names.get(thread, str(thread.number))

    def process_name(self, process: int) -> str:
        return self.process_names.get(process, f"process {process}")

    def rows(self) -> list[Row]:
        """The sums, by threads and by the time that they took."""
        sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0])
        for span in self.spans:
            kind = _natural(self.name_of(span.thread))[0].rstrip("-_ ")
            entry = sums[kind, span.name]
            entry[0] += 1
            entry[1] += span.seconds
            entry[2] += span.bytes
        rows = [Row(*key, int(n), seconds, int(size)) for key, (n, seconds, size) in sums.items()]
        return sorted(rows, key=lambda row: (row.threads, -row.seconds, row.name))

    def as_dict(self) -> dict[str, Any]:
        """The sums, in a form for JSON."""
        return {
            "seconds": self.seconds,
            "spans": len(self.spans),
            "threads": [self.name_of(thread) for thread in self.threads()],
            "rows": [asdict(row) for row in self.rows()],
        }


def read_traces(paths: Sequence[str | os.PathLike[str]]) -> Trace:
    """Read traces of the processes of one machine, as one.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is no Chrome trace.
    """
    spans: list[Span] = []
    thread_names: dict[Thread, str] = {}
    process_names: dict[int, str] = {}
    for path in paths:
        for event in _events(Path(path)):
            try:
                kind = event.get("ph")
                if kind not in ("M", "X"):
                    continue
                thread = Thread(int(event.get("pid", 0)), int(event.get("tid", 0)))
                arguments = event.get("args") or {}
                if kind == "X":
                    begin, lasts = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
                    if not (math.isfinite(begin) and 0 <= lasts < math.inf):
                        raise ValueError("its times are no times")
                    size = int(arguments.get("bytes", 0))
                    spans.append(Span(thread, str(event["name"]), begin, lasts, size))
                elif event.get("name") == "thread_name":
                    thread_names[thread] = str(arguments["name"])
                elif event.get("name") == "process_name":
                    process_names[thread.process] = str(arguments["name"])
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: an event is not of Chrome's format: {error}") from error
    return Trace(tuple(_from_zero(spans)), thread_names, process_names)


def _events(path: Path) -> Iterable[Any]:
    try:
        content = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ValueError(f"{path}: no Chrome trace: it has no list of events")
    return events


def _from_zero(spans: list[Span]) -> list[Span]:
    first = min((span.begin for span in spans), default=0.0)
    spans.sort(key=lambda span: (span.begin, -span.seconds))
    return [
        Span(span.thread, span.name, span.begin - first, span.seconds, span.bytes) for span in spans
    ]


def _natural(name: str) -> tuple[str, int]:
    """``pyckpt-io-10`` comes after ``pyckpt-io-9``."""
    text = name.rstrip("0123456789")
    return text, int(name[len(text) :] or -1)
