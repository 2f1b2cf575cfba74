"""CUPTI's records of CUDA calls, and of the copies and waits that they caused."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from pyckpt.profiling.nsys import database as db
from pyckpt.profiling.nsys.ranges import process_of

WaitKind = Literal["stream", "device", "event", "copy"]

# Calls that make the host wait, by the names that nsys records. Enqueuing a wait
# (cudaStreamWaitEvent, sync type 2) does not make it wait.
_WAITING_CALLS: dict[str, WaitKind] = {
    "cudaStreamSynchronize": "stream",
    "cudaDeviceSynchronize": "device",
    "cudaThreadSynchronize": "device",
    "cudaEventSynchronize": "event",
    "cuStreamSynchronize": "stream",
    "cuCtxSynchronize": "device",
    "cuEventSynchronize": "event",
}
_SYNC_TYPES: dict[str, WaitKind] = {
    "EVENT_SYNCHRONIZE": "event",
    "STREAM_SYNCHRONIZE": "stream",
    "CONTEXT_SYNCHRONIZE": "device",
}
_BLOCKING_COPY = re.compile(r"cu(da)?Memcpy(?!.*Async)")
UNKNOWN = "(unknown)"


Key = tuple["int | None", "int | None"]
"""A process and a correlation id, by which CUPTI relates an activity to its call."""


@dataclass(frozen=True)
class Call:
    start: int
    end: int
    thread: int | None
    process: int | None
    correlation: int | None
    api: str


@dataclass(frozen=True)
class Copy:
    direction: str
    source: str
    destination: str
    bytes: int
    nanoseconds: int


def read_calls(database: db.Database) -> list[Call]:
    """The calls that wait by their names, and those with recorded copies or waits."""
    strings = database.strings({name for (name,) in database.rows(db.CALLS, ("nameId",))})
    apis = {id: db.base_name(name) for id, name in strings.items()}
    waiting = {id for id, api in apis.items() if api in _WAITING_CALLS}
    correlated = {
        correlation
        for table in (db.COPIES, db.SYNCS)
        for (correlation,) in database.rows(table, ("correlationId",))
    }
    columns = ("start", "end", "globalTid", "correlationId", "nameId")
    return [
        Call(start, end, thread, process_of(thread), correlation, apis.get(name, UNKNOWN))
        for start, end, thread, correlation, name in database.rows(db.CALLS, columns)
        if name in waiting or (correlation is not None and correlation in correlated)
    ]


def by_correlation(calls: list[Call]) -> dict[Key, Call]:
    found: dict[Key, Call] = {}
    for call in calls:
        if call.correlation is not None:
            found[call.process, call.correlation] = call
            # For activities without a column of their process.
            found.setdefault((None, call.correlation), call)
    return found


def by_thread(calls: list[Call]) -> dict[int | None, list[Call]]:
    groups: dict[int | None, list[Call]] = defaultdict(list)
    # If calls begin together, the outermost comes first.
    for call in sorted(calls, key=lambda call: (call.start, -call.end)):
        groups[call.thread].append(call)
    return groups


def read_waits(database: db.Database) -> dict[Key, list[tuple[WaitKind, int]]]:
    """The recorded waits, by process and correlation id: kinds and nanoseconds."""
    types = database.enumeration("ENUM_CUPTI_SYNC_TYPE")
    columns = ("start", "end", "globalPid", "correlationId", "syncType")
    waits: dict[Key, list[tuple[WaitKind, int]]] = defaultdict(list)
    for start, end, process, correlation, type_id in database.rows(db.SYNCS, columns):
        kind = _SYNC_TYPES.get(types.get(type_id, ""))
        if kind is not None:
            waits[process_of(process), correlation].append((kind, end - start))
    return waits


def read_copies(database: db.Database) -> dict[Key, list[Copy]]:
    directions = database.enumeration("ENUM_CUDA_MEMCPY_OPER")
    memories = database.enumeration("ENUM_CUDA_MEM_KIND")

    def memory(kind: int | None) -> str:
        return "unknown" if kind is None else memories.get(kind, f"kind {kind}").lower()

    groups: dict[Key, list[Copy]] = defaultdict(list)
    columns = (
        *("start", "end", "globalPid", "correlationId"),
        *("bytes", "copyKind", "srcKind", "dstKind"),
    )
    for start, end, process, correlation, size, kind, source, target in database.rows(
        db.COPIES, columns
    ):
        # DTOH -> d2h, UVM_HTOD -> uvm_h2d
        direction = directions.get(kind, f"kind {kind}").lower().replace("to", "2")
        groups[process_of(process), correlation].append(
            Copy(direction, memory(source), memory(target), size, end - start)
        )
    return groups


def kind_of(call: Call, activity: WaitKind | None, copies: list[Copy] | None) -> WaitKind | None:
    """How the call makes the host wait, if it does."""
    if call.api in _WAITING_CALLS:
        return _WAITING_CALLS[call.api]
    if copies and _BLOCKING_COPY.match(call.api):
        # Between devices, or within one, these do not wait.
        return "copy" if any(c.direction in ("d2h", "h2d") for c in copies) else None
    return activity
