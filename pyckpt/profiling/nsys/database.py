"""The SQLite export of a report: opening it, and the meaning of its ids and names.

The schema and its columns change with the version of nsys, and tables exist only if such events
were recorded. So absent tables have no rows here, absent columns are None, and ids are looked up in
the export's own ENUM tables. If an ENUM table is absent, the ids that NVIDIA documents are used
(Nsight Systems, "SQLite Schema Event Values").
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
SYNCS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
NVTX = "NVTX_EVENTS"

_TEXTS = ("name", "text", "value")

# Table -> the prefix of its names, and their rest by id.
_DOCUMENTED: Mapping[str, tuple[str, Mapping[int, str]]] = {
    "ENUM_CUDA_MEMCPY_OPER": (
        "CUDA_MEMCPY_KIND_",
        {
            0: "UNKNOWN",
            1: "HTOD",
            2: "DTOH",
            3: "HTOA",
            4: "ATOH",
            5: "ATOA",
            6: "ATOD",
            7: "DTOA",
            8: "DTOD",
            9: "HTOH",
            10: "PTOP",
            11: "UVM_HTOD",
            12: "UVM_DTOH",
            13: "UVM_DTOD",
        },
    ),
    # CUPTI has other numbers for these.
    "ENUM_CUDA_MEM_KIND": (
        "CUDA_MEMOPR_MEMORY_KIND_",
        {
            0: "PAGEABLE",
            1: "PINNED",
            2: "DEVICE",
            3: "ARRAY",
            4: "MANAGED",
            5: "DEVICE_STATIC",
            6: "MANAGED_STATIC",
            7: "UNKNOWN",
        },
    ),
    "ENUM_CUPTI_SYNC_TYPE": (
        "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_",
        {
            0: "UNKNOWN",
            1: "EVENT_SYNCHRONIZE",
            2: "STREAM_WAIT_EVENT",
            3: "STREAM_SYNCHRONIZE",
            4: "CONTEXT_SYNCHRONIZE",
        },
    ),
    "ENUM_NSYS_EVENT_TYPE": (
        "",
        {59: "NvtxPushPopRange", 60: "NvtxStartEndRange", 75: "NvtxDomainCreate"},
    ),
}


class Database:
    """Reads tables of an export."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            self._tables = {
                name: kind == "table" and not sql.upper().startswith("CREATE VIRTUAL")
                for name, kind, sql in self._connection.execute(
                    "SELECT name, type, sql FROM sqlite_master WHERE type IN ('table', 'view')"
                )
            }
        except sqlite3.DatabaseError as error:
            self.close()
            raise ValueError(f"{path}: not an SQLite database ({error})") from error
        if not self._tables.get("StringIds"):
            self.close()
            raise ValueError(
                f"{path}: not a report of nsys: it has no table StringIds; "
                "export with nsys export --type sqlite"
            )

    def close(self) -> None:
        self._connection.close()

    def has(self, table: str) -> bool:
        return table in self._tables

    def columns(self, table: str) -> frozenset[str]:
        if not self.has(table):
            return frozenset()
        if not self._tables[table]:
            # Rows of a view or a virtual table are computed, perhaps without end.
            raise ValueError(f"{self.path}: not a report of nsys: {table} is not a plain table")
        return frozenset(row[1] for row in self._connection.execute(f"PRAGMA table_info({table})"))

    def rows(
        self, table: str, columns: Sequence[str], where: str = "", parameters: Sequence[Any] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """``columns`` of each row of ``table``, None for a column that it lacks; no rows if the
        table is absent. ``where`` may only name columns that exist."""
        present = self.columns(table)
        if not present:
            return
        self._check_types(table, columns, present)
        # "end" is a keyword of SQL.
        chosen = ", ".join(f'"{name}"' if name in present else "NULL" for name in columns)
        condition = f" WHERE {where}" if where else ""
        yield from self._connection.execute(
            f"SELECT {chosen} FROM {table}{condition}", tuple(parameters)
        )

    def _check_types(self, table: str, columns: Sequence[str], present: frozenset[str]) -> None:
        """Check that columns have nsys's types, since SQLite itself accepts any type."""
        for name in columns:
            if name not in present:
                types: tuple[str, ...] = ()
            elif name in _TEXTS:
                types = ("text", "null")
            elif name in ("start", "bytes") or (name == "end" and table != NVTX):
                types = ("integer",)
            else:
                types = ("integer", "null")
            if name in ("start", "end", "bytes") and not types:
                raise ValueError(f"{self.path}: {table} has no column {name}")
            listed = ", ".join(f"'{one}'" for one in types)
            if (
                types
                and self._connection.execute(
                    f'SELECT 1 FROM {table} WHERE typeof("{name}") NOT IN ({listed}) LIMIT 1'
                ).fetchone()
            ):
                raise ValueError(f"{self.path}: {table} has a {name} that is no {types[0]}")

    def strings(self, ids: set[int] | None = None) -> dict[int, str]:
        """The texts of ``StringIds``, all or those of ``ids``."""
        rows = self.rows("StringIds", ("id", "value"))
        return {id: value for id, value in rows if value is not None and (ids is None or id in ids)}

    def enumeration(self, table: str) -> dict[int, str]:
        """The names of an ENUM table by id, without their common prefix."""
        prefix, documented = _DOCUMENTED[table]
        found = {
            id: name.removeprefix(prefix) for id, name in self.rows(table, ("id", "name")) if name
        }
        return found or dict(documented)

    def metadata(self, name: str) -> str | None:
        rows = self.rows("META_DATA_EXPORT", ("value",), "name = ?", (name,))
        return next((value for (value,) in rows), None)


@contextmanager
def opened(path: Path) -> Iterator[Database]:
    """The database of a report. nsys exports an .nsys-rep to one first."""
    with _exported(path) as export:
        database = Database(export)
        try:
            yield database
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path}: a damaged SQLite database ({error})") from error
        finally:
            database.close()


@contextmanager
def _exported(path: Path) -> Iterator[Path]:
    if path.suffix != ".nsys-rep":
        yield path
        return
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    nsys = shutil.which("nsys")
    if nsys is None:
        raise FileNotFoundError(
            errno.ENOENT,
            "nsys is not installed here, which reading an .nsys-rep takes; where it is, "
            "run: nsys export --type sqlite " + path.name,
            str(path),
        )
    with tempfile.TemporaryDirectory(prefix="pyckpt-nsys-") as directory:
        output = Path(directory) / "report.sqlite"
        done = subprocess.run(
            [nsys, "export", "--type", "sqlite", "--output", str(output), str(path)],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0 or not output.exists():
            said = (done.stderr or done.stdout).strip()
            raise ValueError(f"{path}: nsys export failed ({done.returncode}): {said}")
        yield output


def base_name(api: str) -> str:
    """An API call without its version: ``cudaStreamSynchronize_ptsz_v7000`` and
    ``cudaStreamSynchronize_v3020`` are both ``cudaStreamSynchronize``."""
    return re.sub(r"(_pts[zd])?(_v\d+)?(_pts[zd])?$", "", api)
