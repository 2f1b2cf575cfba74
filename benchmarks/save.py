"""How fast checkpoints are saved: DirectWriter beside fio and stock FileSystemWriter.

    python benchmarks/save.py [--dir DIR] [--rounds 7] [--size-mib 2048] [--quick] [--only SECTION]

Everything is measured in this run and on the file system of DIR; nothing is assumed. Variants that
are compared take turns: in each round each runs once, in an order that is rotated from round to
round, and medians are compared. Before each sample the files of the last one are removed and
everything is synced. Each variant runs once before the rounds; what it wrote then is loaded with
stock ``dcp.load`` and compared byte by byte. Files are durable (fsync) when the clock stops.

large     2 GiB in 128 tensors. ``fio`` writes as many bytes to one preallocated file, direct, in
          blocks of 8 MiB at depth 16, with an fsync at the end; its time is its own, without making
          and preallocating the file. Ours and stock's is that of the whole ``dcp.save``. Beside it,
          ``write_data`` is the time from opening the file to its being durable.
small     5,000 tensors of 16 KiB and 4,000 scalars: ``write_data`` alone, and all of ``dcp.save``.
mixed     5,000 tensors of 16 KiB and 4,000 Python floats: the CPU time of all of ``dcp.save``, of
          a first save with DCP's own planner, and of one of a known plan with SavePlanner.
memory    By how much the peak of the resident memory lies above what was resident before a first
          save of 2 GiB, in a new process for each sample.
checksum  CRC-32 on one core, in a buffer of 256 KiB that stays in its cache and in one of 64 MiB
          that does not, beside zlib's. And what checksums cost a save: the engine compiled with and
          without them takes turns on the same bytes (checksum_cost.cpp; needs a C++ compiler).

Results go to benchmarks/results/save.json. The exit code is 1 if bytes were wrong, else 0.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _common import (
    LARGE_TENSORS,
    MIB,
    ROOT,
    SCALARS,
    SMALL_TENSORS,
    Options,
    Report,
    Sample,
    State,
    Variant,
    WrongBytes,
    cpu_seconds_per_gigabyte,
    fio,
    gigabytes_per_second,
    in_children,
    interleave,
    large_state,
    mixed_state,
    must_equal,
    nbytes,
    peak_growth,
    remove,
    run,
    small_state,
    timed,
    zeros_like,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import pyckpt
from pyckpt import _C

OURS = "DirectWriter"
KNOWN = "DirectWriter, known plan"
STOCK_THREADS = (1, 2, 4)


def stock_name(threads: int) -> str:
    return f"FileSystemWriter, thread_count={threads}"


STOCK = [stock_name(threads) for threads in STOCK_THREADS]


def new_writer(kind: str, path: Path) -> Any:
    if kind == OURS:
        return pyckpt.DirectWriter(path)
    return FileSystemWriter(path, thread_count=STOCK_THREADS[STOCK.index(kind)])


def save(kind: str, state: State, path: Path) -> Sample:
    """Save, and take the time of it all and of ``write_data``."""
    writer = new_writer(kind, path)
    write_data = writer.write_data
    spent = 0.0

    def timed_write_data(plan: Any, planner: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        future = write_data(plan, planner)
        future.wait()
        spent = time.perf_counter() - start
        return future

    writer.write_data = timed_write_data
    start = time.perf_counter()
    dcp_save(state, storage_writer=writer, no_dist=True)
    sample = {"seconds": time.perf_counter() - start, "write_data_seconds": spent}
    if kind == OURS:
        statistics = writer.statistics
        sample |= {
            "job_seconds": statistics.seconds,
            "copy_thread_seconds": statistics.copy_seconds,
            "checksum_thread_seconds": statistics.checksum_seconds,
            "write_thread_seconds": statistics.write_seconds,
            "sync_seconds": statistics.sync_seconds,
            "direct": statistics.direct,
        }
    return sample


def savers(state: State, path: Path) -> list[Variant]:
    """DirectWriter and the stock writers, each checked with stock's load."""

    def check(kind: str) -> None:
        found = zeros_like(state)
        dcp_load(found, storage_reader=FileSystemReader(path), no_dist=True)
        must_equal(found, state, kind)

    def variant(kind: str) -> Variant:
        return Variant(
            kind,
            run=lambda: save(kind, state, path),
            check=lambda: check(kind),
            clean=lambda: remove(path),
        )

    return [variant(kind) for kind in (OURS, *STOCK)]


# --- sections ---------------------------------------------------------------------------------


def measure_large(report: Report, options: Options) -> None:
    state = large_state(options.size)
    size = nbytes(state)
    variants = savers(state, options.directory / "checkpoint")
    if report.machine["fio"]:
        file = options.directory / "fio"
        variants.insert(
            0, Variant("fio", run=lambda: fio(file, size, "write"), clean=lambda: remove(file))
        )
    report.add(
        "large",
        interleave(
            variants,
            options.rounds,
            before=os.sync,
            console=report.console,
            title=f"{size / MIB:,.0f} MiB in {LARGE_TENSORS} tensors, fsync",
        ),
    )
    report.table(
        "Large tensors",
        "large",
        {
            "seconds": gigabytes_per_second(size),
            "write_data_seconds": ("write_data GB/s", lambda seconds: size / seconds / 1e9),
            "cpu_seconds": cpu_seconds_per_gigabyte(size),
        },
    )
    if not report.median("large", OURS, "direct"):
        report.note("the file system refused direct I/O: DirectWriter went through the page cache")
    best = report.best("large", STOCK)
    report.target(
        "large: dcp.save's GB/s over fio's", report.ratio("large", "fio", OURS), at_least=0.95
    )
    report.target(
        f"large: dcp.save's GB/s over the best of stock's ({best})",
        report.ratio("large", best, OURS),
        at_least=1.5,
    )
    cpu = report.median("large", OURS, "cpu_seconds")
    report.target(
        "large: CPU seconds of dcp.save a GB",
        None if cpu is None else cpu / size * 1e9,
        at_most=0.15,
    )


def measure_small(report: Report, options: Options) -> None:
    state = small_state()
    items = SMALL_TENSORS + SCALARS
    report.add(
        "small",
        interleave(
            savers(state, options.directory / "checkpoint"),
            options.rounds,
            before=os.sync,
            console=report.console,
            title=f"{SMALL_TENSORS:,} tensors of 16 KiB and {SCALARS:,} scalars, fsync",
        ),
    )
    report.table(
        "Small items",
        "small",
        {
            "seconds": ("dcp.save ms", lambda seconds: seconds * 1e3),
            "write_data_seconds": ("write_data ms", lambda seconds: seconds * 1e3),
        },
    )
    ours = report.median("small", OURS) or 0.0
    report.note(f"dcp.save with DirectWriter takes {ours / items * 1e6:.1f} microseconds an item")
    best_write = report.best("small", STOCK, "write_data_seconds")
    report.target(
        f"small: write_data faster than the best of stock's ({best_write})",
        report.ratio("small", best_write, OURS, "write_data_seconds"),
        at_least=10,
        unit="x",
    )
    report.target(
        f"small: write_data faster than stock's default ({STOCK[0]})",
        report.ratio("small", STOCK[0], OURS, "write_data_seconds"),
        at_least=10,
        unit="x",
    )
    best_save = report.best("small", STOCK)
    report.target(
        f"small: dcp.save's time over that of the best of stock's ({best_save})",
        report.ratio("small", OURS, best_save),
        at_most=0.5,
    )


def measure_mixed(report: Report, options: Options) -> None:
    state = mixed_state()
    path = options.directory / "checkpoint"
    planner = pyckpt.SavePlanner()

    def known_plan() -> None:
        dcp_save(state, storage_writer=pyckpt.DirectWriter(path), planner=planner, no_dist=True)

    known_plan()  # the runs after it have its plan
    first, *stock = savers(state, path)
    known = Variant(KNOWN, run=lambda: timed(known_plan), check=first.check, clean=first.clean)
    report.add(
        "mixed",
        interleave(
            [first, known, stock[0]],
            options.rounds,
            before=os.sync,
            console=report.console,
            title=f"{SMALL_TENSORS:,} tensors of 16 KiB and {SCALARS:,} Python floats, fsync",
        ),
    )
    report.table(
        "Mixed items",
        "mixed",
        {
            "seconds": ("dcp.save ms", lambda seconds: seconds * 1e3),
            "cpu_seconds": ("CPU ms", lambda seconds: seconds * 1e3),
        },
    )
    for variant, share in ((KNOWN, 20), (OURS, 5)):
        report.target(
            f"mixed: CPU time of {STOCK[0]} over that of {variant}",
            report.ratio("mixed", STOCK[0], variant, "cpu_seconds"),
            at_least=share,
            unit="x",
        )


def _save_in_child(rank: int, kind: str, size: int, path: Path) -> Sample:
    state = large_state(size, fill=False)
    writer = new_writer(kind, path)
    return peak_growth(lambda: dcp_save(state, storage_writer=writer, no_dist=True))


def measure_memory(report: Report, options: Options) -> None:
    path = options.directory / "checkpoint"

    def in_child(kind: str) -> Sample:
        sample: Sample = in_children(1, _save_in_child, kind, options.size, path)[0]
        return sample

    def variant(kind: str) -> Variant:
        return Variant(kind, run=lambda: in_child(kind), clean=lambda: remove(path))

    report.add(
        "memory",
        interleave(
            [variant(kind) for kind in (OURS, STOCK[0], STOCK[-1])],
            min(3, options.rounds),
            before=os.sync,
            console=report.console,
            title=f"peak memory of a save of {options.size / MIB:,.0f} MiB, each in a new process",
        ),
    )
    report.table("Memory", "memory", {"growth_bytes": ("peak growth MiB", lambda size: size / MIB)})
    ring = pyckpt.Engine.slot_bytes * pyckpt.Engine.io_threads
    growth = report.median("memory", OURS, "growth_bytes")
    report.target(
        f"memory: peak growth of a save (the ring's {ring // MIB} MiB + 64 MiB)",
        None if growth is None else growth / MIB,
        at_most=ring / MIB + 64,
        unit="MiB",
    )


# --- checksums --------------------------------------------------------------------------------


def measure_checksum(report: Report, options: Options) -> None:
    _measure_crc32(report, options)
    _measure_cost(report, options)
    _show_thread_time(report)


def _measure_crc32(report: Report, options: Options) -> None:
    for where, size in (("in the core's cache", 256 << 10), ("from memory", 64 * MIB)):
        data = os.urandom(size)
        repeats = max(1, 128 * MIB // size)

        def sample(
            function: Callable[[bytes], int], data: bytes = data, repeats: int = repeats
        ) -> Sample:
            start = time.perf_counter()
            for _ in range(repeats):
                function(data)
            return {"seconds": (time.perf_counter() - start) / repeats}

        def check(data: bytes = data) -> None:
            if _C.crc32(data) != zlib.crc32(data):
                raise WrongBytes("our CRC-32 is not zlib's")

        group = f"crc32 {where}"
        report.add(
            group,
            interleave(
                [
                    Variant("pyckpt", run=lambda s=sample: s(_C.crc32), check=check),  # type: ignore[misc]
                    Variant("zlib", run=lambda s=sample: s(zlib.crc32)),  # type: ignore[misc]
                ],
                3 * options.rounds,
                before=lambda: None,
                console=report.console,
                title=f"CRC-32 of {size >> 10} KiB, one thread",
                quiet=True,
            ),
        )
        report.table(f"CRC-32 {where}", group, {"seconds": gigabytes_per_second(size)})
        seconds = report.median(group, "pyckpt")
        speed = None if seconds is None else size / seconds / 1e9
        if size < MIB:
            report.target(f"CRC-32 on one core, {where}", speed, at_least=8, unit="GB/s")


def _measure_cost(report: Report, options: Options) -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        report.note(f"{compiler} was not found: the cost of checksums is not measured")
        report.target("checksums: what they add to the time of a save", None, at_most=3, unit="%")
        return
    each = options.size // LARGE_TENSORS
    path = options.directory / "engine"
    programs = _compiled(compiler, options.directory)
    with _engine(programs[0], each) as checked, _engine(programs[1], each) as unchecked:
        report.add(
            "checksum cost",
            interleave(
                [
                    Variant(name, run=lambda e=engine: e(path), clean=lambda: remove(path))  # type: ignore[misc]
                    for name, engine in (("with", checked), ("without", unchecked))
                ],
                2 * options.rounds,
                before=os.sync,
                console=report.console,
                title=f"the engine alone, {options.size / MIB:,.0f} MiB, with checksums or not",
            ),
        )
    report.table(
        "Cost of checksums",
        "checksum cost",
        {"seconds": gigabytes_per_second(each * LARGE_TENSORS)},
    )
    ratio = report.ratio("checksum cost", "with", "without")
    report.target(
        "checksums: what they add to the time of a save (engine with and without, interleaved)",
        None if ratio is None else 100 * (ratio - 1),
        at_most=3,
        unit="%",
    )


def _compiled(compiler: str, directory: Path) -> tuple[Path, Path]:
    """The engine as a program that saves when it is told to, with checksums and without."""
    flags = ["-std=c++17", "-O3", "-pthread", f"-I{ROOT / 'csrc'}"]
    main = ROOT / "benchmarks" / "checksum_cost.cpp"
    # The engine needs neither Python nor CUDA.
    engine = [
        path
        for path in (ROOT / "csrc").glob("*.cpp")
        if not path.name.startswith("bindings") and not path.name.endswith("_cuda.cpp")
    ]
    objects = {path.stem: directory / f"{path.stem}.o" for path in engine}
    jobs: list[list[str | Path]] = [
        [*flags, main, "-c", "-o", directory / "with.o"],
        [*flags, "-DNO_CHECKSUM", main, "-c", "-o", directory / "without.o"],
    ]
    jobs += [[*flags, path, "-c", "-o", objects[path.stem]] for path in engine]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda job: subprocess.run([compiler, *job], check=True), jobs))
    for name, left_out in (("with", ""), ("without", "crc32")):
        linked = [path for stem, path in objects.items() if stem.split("_")[0] != left_out]
        linked += [directory / f"{name}.o", Path("-o"), directory / name]
        subprocess.run([compiler, "-pthread", *linked], check=True)
    return directory / "with", directory / "without"


@contextmanager
def _engine(program: Path, tensor_bytes: int) -> Iterator[Callable[[Path], Sample]]:
    process = subprocess.Popen(
        [program, str(LARGE_TENSORS), str(tensor_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def save_with_engine(path: Path) -> Sample:
        stdin.write(f"{path}\n")
        stdin.flush()
        seconds = [float(word) for word in stdout.readline().split()]
        names = (
            "seconds",
            "copy_thread_seconds",
            "checksum_thread_seconds",
            "write_thread_seconds",
        )
        return dict(zip(names, seconds, strict=True))

    try:
        if stdout.readline() != "ready\n":
            raise RuntimeError("the engine did not start")
        yield save_with_engine
    finally:
        stdin.close()
        process.wait()


def _show_thread_time(report: Report) -> None:
    """The same from within a save by DirectWriter, where section "large" was run."""
    spreads = report.results.get("large", {}).get(OURS)
    if spreads is None:
        return
    parts = {
        part: spreads[f"{part}_thread_seconds"].median for part in ("copy", "checksum", "write")
    }
    threads = pyckpt.Engine.io_threads
    available = threads * spreads["job_seconds"].median
    report.note(
        f"of the time of the {threads} I/O threads in a large save by DirectWriter: "
        + ", ".join(f"{part} {seconds / available:.1%}" for part, seconds in parts.items())
    )
    report.note(
        f"checksums took {parts['checksum'] / sum(parts.values()):.1%} of copy + checksum + write; "
        "while one thread checksums the others write, so this is more than the save pays"
    )


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(
        run(
            "save",
            {
                "large": measure_large,
                "small": measure_small,
                "mixed": measure_mixed,
                "memory": measure_memory,
                "checksum": measure_checksum,
            },
            __doc__,
        )
    )
