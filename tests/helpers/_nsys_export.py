"""Builds what ``nsys export --type sqlite`` writes: the documented schema (3.16, nsys 2024.6), and
variants with fewer and more columns and tables, as other versions have."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROCESS = 0x01_000123_000000
"""A globalPid: the host's number, the process's, no thread."""
MAIN, WORKER = PROCESS | 0x123, PROCESS | 0x456
OTHER_PROCESS = 0x01_000777_000000

SCHEMA = """
StringIds: id value
ThreadNames: nameId priority globalTid
META_DATA_EXPORT: name value
CUPTI_ACTIVITY_KIND_RUNTIME: start end eventClass globalTid correlationId nameId returnValue
    callchainId
CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: start end deviceId contextId greenContextId streamId
    correlationId globalPid syncType eventId
CUPTI_ACTIVITY_KIND_MEMCPY: start end deviceId contextId greenContextId streamId correlationId
    globalPid bytes copyKind deprecatedSrcId srcKind dstKind srcDeviceId srcContextId dstDeviceId
    dstContextId migrationCause graphNodeId virtualAddress
NVTX_EVENTS: start end eventType rangeId category color text globalTid endGlobalTid textId domainId
    uint64Value int64Value doubleValue uint32Value int32Value floatValue jsonTextId jsonText
    binaryData
"""
COLUMNS = {
    table: columns.split()
    for table, columns in re.findall(r"^(\w+):((?: +\w+|\n +\w+)+)", SCHEMA, re.MULTILINE)
}
ENUMS = {
    "ENUM_CUDA_MEMCPY_OPER": {
        0: "CUDA_MEMCPY_KIND_UNKNOWN",
        1: "CUDA_MEMCPY_KIND_HTOD",
        2: "CUDA_MEMCPY_KIND_DTOH",
        8: "CUDA_MEMCPY_KIND_DTOD",
        12: "CUDA_MEMCPY_KIND_UVM_DTOH",
    },
    "ENUM_CUDA_MEM_KIND": {
        0: "CUDA_MEMOPR_MEMORY_KIND_PAGEABLE",
        1: "CUDA_MEMOPR_MEMORY_KIND_PINNED",
        2: "CUDA_MEMOPR_MEMORY_KIND_DEVICE",
    },
    "ENUM_CUPTI_SYNC_TYPE": {
        1: "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE",
        2: "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT",
        3: "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE",
        4: "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE",
    },
    "ENUM_NSYS_EVENT_TYPE": {
        34: "NvtxMark",
        59: "NvtxPushPopRange",
        60: "NvtxStartEndRange",
        75: "NvtxDomainCreate",
    },
}


class Export:
    """An export in the making. Times are nanoseconds."""

    def __init__(
        self,
        *,
        without: Sequence[str] = (),
        extra: Sequence[str] = (),
        enums: dict[str, dict[int, str]] | None = None,
    ) -> None:
        self._without = frozenset(without)
        """Tables, and columns as ``TABLE.column``."""
        self._extra = tuple(extra)
        """Columns that every table has besides."""
        self._enums = ENUMS if enums is None else enums
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        self._correlation = 0
        self.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2024.6.2.225")

    def add(self, table: str, **values: Any) -> None:
        self._rows.setdefault(table, []).append(values)

    def string(self, text: str) -> int:
        return self._strings.setdefault(text, 1000 + len(self._strings))

    def call(
        self, api: str, start: int, end: int, *, thread: int | None = MAIN, driver: bool = False
    ) -> int:
        """A CUDA API call; returns its correlation id."""
        self._correlation += 1
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=end,
            eventClass=int(driver),
            globalTid=thread,
            correlationId=self._correlation,
            nameId=self.string(api),
            returnValue=0,
        )
        return self._correlation

    def copy(
        self,
        correlation: int | None,
        kind: int,
        size: int,
        *,
        source: int = 2,
        target: int = 1,
        process: int = PROCESS,
        start: int = 0,
        end: int = 1000,
    ) -> None:
        self.add(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start=start,
            end=end,
            correlationId=correlation,
            globalPid=process,
            bytes=size,
            copyKind=kind,
            srcKind=source,
            dstKind=target,
        )

    def sync(self, correlation: int, kind: int, start: int, end: int) -> None:
        self.add(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
            start=start,
            end=end,
            correlationId=correlation,
            globalPid=PROCESS,
            syncType=kind,
            eventId=0,
        )

    def item(self, start: int, *, thread: int = MAIN) -> None:
        """What ``.item()`` leaves: 4 bytes into pinned memory, and 100 ns of waiting."""
        self.copy(self.call("cudaMemcpyAsync_v3020", start, start + 10, thread=thread), 2, 4)
        waiting = self.call("cudaStreamSynchronize_v3020", start + 10, start + 110, thread=thread)
        self.sync(waiting, 3, start + 12, start + 108)

    def range(
        self,
        name: str | None,
        start: int,
        end: int | None,
        *,
        kind: int = 59,
        thread: int = MAIN,
        end_thread: int | None = None,
        registered: bool = False,
        domain: int = 0,
    ) -> None:
        self.add(
            "NVTX_EVENTS",
            start=start,
            end=end,
            eventType=kind,
            text=None if registered else name,
            textId=self.string(name) if registered and name else None,
            globalTid=thread,
            endGlobalTid=end_thread,
            domainId=domain,
        )

    def write(self, path: Path) -> Path:
        for text, id in self._strings.items():
            self.add("StringIds", id=id, value=text)
        self._rows.setdefault("StringIds", [])
        for table, names in self._enums.items():
            for id, name in names.items():
                self.add(table, id=id, name=name, label=name)
        connection = sqlite3.connect(path)
        for table, rows in self._rows.items():
            if table in self._without:
                continue
            columns = [*COLUMNS.get(table, ["id", "name", "label"]), *self._extra]
            columns = [name for name in columns if f"{table}.{name}" not in self._without]
            quoted = ", ".join(f'"{name}"' for name in columns)
            connection.execute(f"CREATE TABLE {table} ({quoted})")
            connection.executemany(
                f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})",
                [[row.get(name) for name in columns] for row in rows],
            )
        connection.commit()
        connection.close()
        return path


def steps(reads: int, **options: object) -> Export:
    """Ten steps of a training loop; in each, ``reads`` scalars are read in the optimizer's range,
    and one, the loss, outside of it."""
    export = Export(**options)  # type: ignore[arg-type]
    export.add("ThreadNames", nameId=export.string("python3"), globalTid=MAIN)
    for step in range(10):
        begin = step * 100_000
        export.range("it step", begin, begin + 90_000)
        export.item(begin + 100)
        export.range("optimizer", begin + 1_000, begin + 80_000, registered=True)
        for number in range(reads):
            export.item(begin + 2_000 + 200 * number)
    return export
