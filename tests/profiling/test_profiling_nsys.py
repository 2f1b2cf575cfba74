"""Reading reports of Nsight Systems: databases built to its schema, with known answers."""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path

import pytest
from _nsys_export import ENUMS, MAIN, OTHER_PROCESS, PROCESS, WORKER, Export, steps

from pyckpt.profiling.nsys import CopyRow, Report, SyncRow, compare, read
from pyckpt.profiling.nsys.database import base_name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.sqlite"


def test_syncs_and_copies_by_range(path: Path) -> None:
    report = read(steps(20).write(path))
    assert report.version == "2024.6.2.225"
    assert report.notes == ()
    assert {name: info.instances for name, info in report.ranges.items()} == {
        "it step": 10,
        "optimizer": 10,
    }
    assert report.ranges["optimizer"].seconds == pytest.approx(790e-6)
    for name, expected in ((None, 210), ("it step", 210), ("optimizer", 200)):
        totals = report.totals(range=name)
        assert totals.stream_syncs == totals.syncs == totals.d2h_copies == expected
        assert totals.d2h_bytes == 4 * expected
        assert totals.waited_seconds == pytest.approx(expected * 100e-9)
        assert (totals.device_syncs, totals.event_syncs, totals.h2d_copies) == (0, 0, 0)
    assert report.totals(range="optimizer").instances == 10
    thread = f"python3 {0x123}"
    assert report.syncs(range="optimizer") == [
        SyncRow(thread, "cudaStreamSynchronize", "stream", 200, pytest.approx(20e-6))  # type: ignore[arg-type]
    ]
    assert report.copies(range="optimizer") == [
        CopyRow(thread, "cudaMemcpyAsync", "d2h", "device", "pinned", 200, 800, pytest.approx(2e-4))  # type: ignore[arg-type]
    ]


def test_kinds_of_waits(path: Path) -> None:
    export = Export()
    export.call("cudaDeviceSynchronize_v3020", 0, 10)
    export.call("cudaEventSynchronize_v3020", 20, 30)
    export.call("cudaStreamSynchronize_ptsz_v7000", 40, 50)
    export.call("cuStreamSynchronize", 60, 70, driver=True)
    export.call("cuCtxSynchronize_v2", 80, 90, driver=True)
    export.call("cuEventSynchronize", 100, 110, driver=True)
    # Neither of these blocks the host; the first is a sync to CUPTI all the same.
    waits = export.call("cudaStreamWaitEvent_v3020", 120, 130)
    export.sync(waits, 2, 120, 130)
    export.call("cudaLaunchKernel_v7000", 140, 150)
    # Nothing in its name says that it waited.
    graph = export.call("cudaGraphExecDestroy_v10000", 160, 170)
    export.sync(graph, 4, 162, 168)
    totals = read(export.write(path)).totals()
    assert (totals.stream_syncs, totals.device_syncs, totals.event_syncs) == (2, 3, 2)


def test_copies_that_are_synchronous_by_themselves(path: Path) -> None:
    export = Export()
    export.copy(export.call("cudaMemcpy_v3020", 0, 10), 2, 100, source=2, target=0)
    export.copy(export.call("cuMemcpyHtoD_v2", 20, 30, driver=True), 1, 50, source=0, target=2)
    export.copy(export.call("cudaMemcpy_v3020", 40, 50), 8, 7, source=2, target=2)
    export.copy(export.call("cudaMemcpyAsync_v3020", 60, 70), 2, 1)
    export.copy(export.call("cudaMemcpy2DAsync_v3020", 80, 90), 2, 1)
    export.copy(None, 12, 4096, source=4, target=0)
    report = read(export.write(path))
    totals = report.totals()
    assert totals.blocking_copy_calls == 2
    assert totals.syncs == 0
    assert (totals.d2h_copies, totals.d2h_bytes) == (3, 102)
    assert (totals.h2d_copies, totals.h2d_bytes) == (1, 50)
    assert {(row.api, row.direction, row.source, row.destination) for row in report.copies()} == {
        ("cudaMemcpy", "d2h", "device", "pageable"),
        ("cuMemcpyHtoD", "h2d", "pageable", "device"),
        ("cudaMemcpy", "d2d", "device", "device"),
        ("cudaMemcpyAsync", "d2h", "device", "pinned"),
        ("cudaMemcpy2DAsync", "d2h", "device", "pinned"),
        ("(unknown)", "uvm_d2h", "kind 4", "pageable"),
    }


def test_a_driver_call_inside_of_a_runtime_call_is_not_another_wait(path: Path) -> None:
    export = Export()
    export.call("cudaStreamSynchronize_v3020", 0, 100)
    export.call("cuStreamSynchronize", 5, 95, driver=True)
    export.call("cuStreamSynchronize", 6, 90, driver=True, thread=WORKER)
    export.call("cuStreamSynchronize", 200, 300, driver=True)
    report = read(export.write(path))
    assert {(row.api, row.thread, row.count) for row in report.syncs()} == {
        ("cudaStreamSynchronize", f"thread {0x123}", 1),
        ("cuStreamSynchronize", f"thread {0x123}", 1),
        ("cuStreamSynchronize", f"thread {0x456}", 1),
    }


def test_a_call_in_ranges_that_nest_and_overlap(path: Path) -> None:
    export = Export()
    export.range("outer", 0, 1000)
    export.range("again", 100, 900)
    export.range("again", 200, 800)  # recursion: a call in both is in "again" once
    export.range("process", 500, 5000, kind=60, thread=WORKER, end_thread=MAIN)
    export.range("overlaps", 700, 1500, kind=60)
    export.range("open", 850, None)
    export.range("elsewhere", 0, 10_000, thread=WORKER)
    export.range("elsewhere, too", 0, 10_000, thread=OTHER_PROCESS | 1, kind=60)
    export.range("mark", 300, None, kind=34)
    for start in (250, 750, 850, 1200, 6000):
        export.call("cudaStreamSynchronize_v3020", start, start + 5)
    report = read(export.write(path))
    found = {name: report.totals(range=name).syncs for name in report.ranges}
    assert found == {
        "outer": 3,
        "again": 3,
        "process": 3,
        "overlaps": 3,
        "open": 3,
        "elsewhere": 0,
        "elsewhere, too": 0,
    }
    assert report.ranges["again"].instances == 2
    assert report.ranges["open"].open == 1
    assert report.ranges["open"].seconds == 0


def test_the_ends_of_a_range(path: Path) -> None:
    export = Export()
    export.range("range", 100, 200)
    for start in (99, 100, 199, 200):
        export.call("cudaStreamSynchronize_v3020", start, start)
    assert read(export.write(path)).totals(range="range").syncs == 2


def test_domains_of_libraries(path: Path) -> None:
    export = Export()
    export.range("NCCL", 0, None, kind=75, domain=7)
    export.range("allReduce", 10, 20, domain=7)
    export.range("allReduce", 30, 40)
    export.range(None, 50, 60)
    assert set(read(export.write(path)).ranges) == {"NCCL:allReduce", "allReduce", "(unnamed)"}


def test_threads(path: Path) -> None:
    export = Export()
    export.add("ThreadNames", nameId=export.string("pt_autograd_0"), globalTid=WORKER)
    export.item(0)
    export.item(500, thread=WORKER)
    export.item(900, thread=WORKER)
    export.call("cudaStreamSynchronize_v3020", 2000, 2010, thread=None)
    report = read(export.write(path))
    assert [(row.thread, row.count) for row in report.syncs()] == [
        (f"pt_autograd_0 {0x456}", 2),
        ("(unknown)", 1),
        (f"thread {0x123}", 1),
    ]


def test_processes_use_the_same_correlation_ids(path: Path) -> None:
    export = Export()
    ours = export.call("cudaMemcpyAsync_v3020", 0, 10)
    export.copy(ours, 2, 4)
    export.copy(ours, 1, 1 << 20, process=OTHER_PROCESS)
    export.range("range", 0, 100)
    report = read(export.write(path))
    assert [row.bytes for row in report.copies(range="range")] == [4]
    assert {row.bytes for row in report.copies()} == {4, 1 << 20}


# --- other versions ---------------------------------------------------------------------------


def test_ids_are_looked_up_by_name(path: Path) -> None:
    """A version that numbered everything otherwise."""
    moved = {table: {id + 70: name for id, name in names.items()} for table, names in ENUMS.items()}
    export = Export(enums=moved)
    export.range("range", 0, 100, kind=129)
    export.range("no range", 0, 100, kind=59)
    export.copy(export.call("cudaMemcpyAsync_v3020", 0, 10), 72, 4, source=72, target=71)
    export.sync(export.call("cudaSomething_v1", 20, 30), 74, 20, 30)
    report = read(export.write(path))
    assert set(report.ranges) == {"range"}
    totals = report.totals(range="range")
    assert (totals.d2h_copies, totals.device_syncs) == (1, 1)
    assert report.copies()[0].destination == "pinned"


@pytest.mark.parametrize("enums", [None, {}], ids=["enum tables", "none"])
@pytest.mark.parametrize(
    "without",
    [
        [],
        ["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "ThreadNames", "META_DATA_EXPORT"],
        [
            "CUPTI_ACTIVITY_KIND_MEMCPY.greenContextId",
            "CUPTI_ACTIVITY_KIND_MEMCPY.virtualAddress",
            "CUPTI_ACTIVITY_KIND_MEMCPY.globalPid",
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION.globalPid",
            "CUPTI_ACTIVITY_KIND_RUNTIME.callchainId",
            "CUPTI_ACTIVITY_KIND_RUNTIME.eventClass",
            "NVTX_EVENTS.endGlobalTid",
            "NVTX_EVENTS.domainId",
        ],
    ],
    ids=["all", "no tables", "no columns"],
)
def test_absent_tables_and_columns(
    path: Path, without: list[str], enums: dict[str, dict[int, str]] | None
) -> None:
    export = steps(3, without=without, extra=["eventSyncId"], enums=enums)
    totals = read(export.write(path)).totals(range="optimizer")
    assert (totals.instances, totals.stream_syncs, totals.d2h_bytes) == (10, 30, 120)


def test_columns_of_memory_kinds_are_optional(path: Path) -> None:
    table = "CUPTI_ACTIVITY_KIND_MEMCPY"
    export = steps(1, without=[f"{table}.srcKind", f"{table}.dstKind"])
    (row,) = read(export.write(path)).copies()
    assert (row.source, row.destination, row.count) == ("unknown", "unknown", 20)


def test_a_report_without_nvtx_or_calls(path: Path) -> None:
    export = steps(2, without=["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"])
    report = read(export.write(path))
    assert len(report.notes) == 2
    assert "no CUDA API calls" in report.notes[0]
    assert report.ranges == {}
    totals = report.totals()  # from the activities, which know no thread
    assert (totals.stream_syncs, totals.d2h_copies) == (30, 30)
    assert {row.thread for row in report.syncs()} == {"(unknown)"}


def test_a_report_in_which_nothing_happened(path: Path) -> None:
    totals = read(Export().write(path)).totals()
    assert (totals.syncs, totals.d2h_copies, totals.h2d_copies) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("cudaStreamSynchronize_v3020", "cudaStreamSynchronize"),
        ("cudaStreamSynchronize_ptsz_v7000", "cudaStreamSynchronize"),
        ("cudaMemcpyAsync_ptsz", "cudaMemcpyAsync"),
        ("cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync"),
        ("cuMemcpyDtoHAsync_v2_ptsz", "cuMemcpyDtoHAsync"),
        ("cuCtxSynchronize", "cuCtxSynchronize"),
    ],
)
def test_names_without_their_version(name: str, base: str) -> None:
    assert base_name(name) == base


# --- errors -----------------------------------------------------------------------------------


def test_what_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as info:
        read(tmp_path / "absent.sqlite")
    assert info.value.filename == str(tmp_path / "absent.sqlite")
    text = tmp_path / "text.sqlite"
    text.write_text("not a database, but long enough to have a header " * 100)
    with pytest.raises(ValueError, match="not an SQLite database"):
        read(text)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (a)")
    connection.close()
    with pytest.raises(ValueError, match="not a report of nsys"):
        read(other)


def test_no_such_range(path: Path) -> None:
    report = read(steps(1).write(path))
    for ask in (report.totals, report.syncs, report.copies, report.as_dict):
        with pytest.raises(ValueError, match="'optimiser'; there is 'optimizer'"):
            ask(range="optimiser")  # type: ignore[operator]


def fake_nsys(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ``nsys`` that does what the Python script says; its arguments are in ``sys.argv``."""
    program = directory / "nsys"
    program.write_text(f"#!{sys.executable}\nimport os, shutil, sys\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))


def test_an_nsys_rep_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = tmp_path / "run.nsys-rep"
    steps(4).write(recorded)
    fake_nsys(
        tmp_path,
        "assert sys.argv[1:5] == ['export', '--type', 'sqlite', '--output'], sys.argv\n"
        "shutil.copy(sys.argv[6], sys.argv[5])",
        monkeypatch,
    )
    report = read(recorded)
    assert report.path == recorded
    assert report.totals(range="optimizer").syncs == 40
    assert sorted(os.listdir(tmp_path)) == ["nsys", "run.nsys-rep"]


def test_an_nsys_rep_that_cannot_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = tmp_path / "run.nsys-rep"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="No such file"):
        read(recorded)
    recorded.write_bytes(b"?")
    with pytest.raises(FileNotFoundError, match=r"nsys is not installed here.*run\.nsys-rep"):
        read(recorded)
    fake_nsys(tmp_path, "sys.exit('cannot read this report')", monkeypatch)
    with pytest.raises(ValueError, match=r"nsys export failed \(1\): cannot read this report"):
        read(recorded)


# --- comparing and showing --------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return (
        steps(20).write(tmp_path / "before.sqlite"),
        steps(0).write(tmp_path / "after.sqlite"),
    )


def test_two_reports(pair: tuple[Path, Path]) -> None:
    comparison = compare(read(pair[0]), read(pair[1]), range="it step")
    totals = {row.name: (row.before, row.after, row.change) for row in comparison.totals}
    assert totals["stream_syncs"] == totals["d2h_copies"] == (210, 10, -200)
    assert totals["instances"] == (10, 10, 0)
    assert [(row.name, row.before, row.after) for row in comparison.syncs] == [
        ("cudaStreamSynchronize", 210, 10)
    ]
    assert [(row.name, row.before, row.after) for row in comparison.copies] == [
        ("d2h (device -> pinned)", 210, 10)
    ]


def test_a_range_that_one_report_lacks(pair: tuple[Path, Path], path: Path) -> None:
    without: Report = read(Export().write(path))
    for reports, expected in (
        ((read(pair[0]), without), (200, 0)),
        ((without, read(pair[0])), (0, 200)),
    ):
        comparison = compare(*reports, range="optimizer")
        (row,) = comparison.syncs
        assert (row.before, row.after) == expected
    with pytest.raises(ValueError, match="no NVTX range"):
        compare(without, without, range="optimizer")


ENDLESS = (
    "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) "
    'SELECT n AS start, n AS "end", 1 AS globalTid, n AS correlationId, 1 AS nameId FROM r'
)


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (f"VIEW CUPTI_ACTIVITY_KIND_RUNTIME AS {ENDLESS}", "not a plain table"),
        (f"VIEW NVTX_EVENTS AS {ENDLESS}", "not a plain table"),
        ("TABLE CUPTI_ACTIVITY_KIND_RUNTIME AS SELECT 'x' AS start, 1 AS \"end\"", "no integer"),
        ('TABLE CUPTI_ACTIVITY_KIND_RUNTIME AS SELECT 1 AS start, NULL AS "end"', "no integer"),
        ("TABLE CUPTI_ACTIVITY_KIND_RUNTIME AS SELECT 1 AS start", "no column end"),
        ("TABLE ENUM_CUDA_MEMCPY_OPER AS SELECT 1 AS id, 2 AS name", "no text"),
    ],
)
def test_databases_that_are_no_reports(path: Path, definition: str, message: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE StringIds(id INTEGER, value TEXT)")
        connection.execute(f"CREATE {definition}")
    connection.close()
    with pytest.raises(ValueError, match=message):
        read(path)


def test_ids_hold_process_and_thread() -> None:
    from pyckpt.profiling.nsys.ranges import process_of

    assert process_of(MAIN) == process_of(WORKER) == process_of(PROCESS)
    assert process_of(PROCESS) != process_of(OTHER_PROCESS)
