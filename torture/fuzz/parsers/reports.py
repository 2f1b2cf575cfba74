"""The parsers of reports of profilers."""

from __future__ import annotations

import json
from typing import Any

from pyckpt.profiling import nsys
from pyckpt.tools.trace import read_traces
from torture.fuzz import mutate
from torture.fuzz.parsers.base import Parser, Wrong

__all__ = ["Nsys", "Trace"]


class Nsys(Parser):
    """An SQLite export of Nsight Systems."""

    mutators = (mutate.database,)
    documented = (ValueError, FileNotFoundError)

    def seeds(self) -> list[bytes]:
        import sqlite3

        tables = {
            "StringIds": (
                "id", "value", [(1, "cudaStreamSynchronize"), (2, "cudaMemcpyAsync"), (3, "range")]
            ),
            "ThreadNames": ("nameId", "priority", "globalTid", [(3, 0, 0x100012300000123)]),
            "META_DATA_EXPORT": ("name", "value", [("EXPORT_PRODUCT_VERSION", "2024.6")]),
            "CUPTI_ACTIVITY_KIND_RUNTIME": (
                "start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue",
                [(10, 20, 0, 0x100012300000123, 1, 1, 0), (30, 40, 0, 0x100012300000123, 2, 2, 0)],
            ),
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
                "start", "end", "deviceId", "correlationId", "globalPid", "syncType",
                [(11, 19, 0, 1, 0x100012300000000, 3)],
            ),
            "CUPTI_ACTIVITY_KIND_MEMCPY": (
                "start", "end", "correlationId", "globalPid", "bytes", "copyKind", "srcKind",
                "dstKind",
                [(31, 39, 2, 0x100012300000000, 4096, 2, 2, 0)],
            ),
            "NVTX_EVENTS": (
                "start", "end", "eventType", "rangeId", "text", "globalTid", "endGlobalTid",
                "textId", "domainId", [(5, 50, 59, None, "step", 0x100012300000123, None, None, 0),
                             (6, 45, 60, 1, None, 0x100012300000123, 0x100012300000123, 3, 0)],
            ),
        }  # fmt: skip
        base = sqlite3.connect(":memory:")
        base.execute("PRAGMA page_size = 512")
        for table, (*columns, rows) in tables.items():
            base.execute(f"CREATE TABLE {table} ({', '.join(map(str, columns))})")
            marks = ", ".join("?" * len(columns))
            base.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        base.commit()
        return [bytes(base.serialize())]  # type: ignore[attr-defined]

    def attempt(self, data: bytes) -> None:
        path = self.folder / "report.sqlite"
        for suffix in ("-wal", "-shm", "-journal"):  # SQLite's, of an input before this one
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.write_bytes(data)
        report = nsys.read(path)
        json.dumps(report.as_dict())
        for name in report.ranges:
            report.totals(range=name)


class Trace(Parser):
    """A Chrome trace."""

    mutators = (mutate.jsons,)
    documented = (ValueError,)

    def seeds(self) -> list[bytes]:
        events: list[Any] = [
            {
                "ph": "X",
                "pid": 1,
                "tid": 2,
                "ts": 5.5,
                "dur": 3,
                "name": "write",
                "args": {"bytes": 7},
            },
            {"ph": "X", "pid": 1, "tid": 3, "ts": 6, "dur": 1, "name": "read", "args": {}},
            {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "io-10"}},
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "python"}},
            {"ph": "i"},
        ]
        return [json.dumps({"traceEvents": events}).encode(), json.dumps(events).encode()]

    def attempt(self, data: bytes) -> None:
        path = self.folder / "trace.json"
        path.write_bytes(data)
        trace = read_traces([path])
        try:
            json.dumps(trace.as_dict())
        except ValueError as error:  # was to be refused when it was read
            raise Wrong(f"a trace that cannot be summed up: {error}") from error
