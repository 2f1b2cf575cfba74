"""How fast checkpoints are loaded: pyckpt.load and DirectReader beside fio and FileSystemReader.

    python benchmarks/load.py [--dir DIR] [--rounds 7] [--size-mib 2048] [--quick] [--only SECTION]

Everything is measured in this run and on the file system of DIR; nothing is assumed. Variants that
are compared take turns: in each round each runs once, in an order that is rotated from round to
round, and medians are compared. Before each sample everything is synced and the page cache dropped:
of the whole machine as root, else by POSIX_FADV_DONTNEED on the files ("page_cache" in the results
says which). Destinations exist and are in memory before the clock starts. Each variant runs once
before the rounds, into zeros, and what it loaded is compared with what was saved.

Two checkpoints of each state are read: one by DirectWriter, one by stock FileSystemWriter (of one
thread), named after the reader: "pyckpt.load, stock's file".

large     2 GiB in 128 tensors. ``fio`` reads as many bytes, direct, in blocks of 8 MiB at depth 16:
          once from a file that it wrote, and once from that of our checkpoint, which is then the
          same place of the disk; the faster of the two counts. Its time is its own, the others'
          that of the whole load.
small     5,000 tensors of 16 KiB and 4,000 scalars.
mixed     5,000 tensors of 16 KiB and 4,000 Python floats: the CPU time.
verify    2 GiB by pyckpt.load with verify="items" and verify="none".
reshard   A state of row-sharded DTensors, saved by 4 processes, loaded by 8, by 3 and by 1: bytes
          that each rank needs (the sizes of its shards), and bytes read, as DirectReader's
          statistics have it and as /proc/self/io counts them, summed over the ranks. There "rchar"
          is what was asked of the kernel, and "read_bytes" what came from the disk: ranks that read
          through the page cache share what they read.
memory    By how much the peak of the resident memory lies above what was resident before a first
          load of 2 GiB, in a new process for each sample; with the destination in memory before
          ("in place"), and with the load making it ("created").

Results go to benchmarks/results/load.json. The exit code is 1 if bytes were wrong, else 0.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import (
    LARGE_TENSORS,
    MIB,
    SCALARS,
    SMALL_TENSORS,
    Options,
    Report,
    Sample,
    State,
    Variant,
    WrongBytes,
    cpu_seconds_per_gigabyte,
    drop_page_cache,
    fio,
    gigabytes_per_second,
    in_children,
    interleave,
    io_counters,
    large_state,
    mixed_state,
    must_equal,
    nbytes,
    peak_growth,
    process_group,
    remove,
    run,
    set_zero,
    small_state,
    timed,
    zeros_like,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import pyckpt

LOAD = "pyckpt.load"
READER = "DirectReader under dcp.load"
STOCK = "FileSystemReader"
OUR_FILE = "our file"
STOCK_FILE = "stock's file"
FILES = (OUR_FILE, STOCK_FILE)
FIO = ("fio, its own file", "fio, our file")


def save(state: Any, path: Path, file: str) -> None:
    writer: Any = (
        pyckpt.DirectWriter(path) if file == OUR_FILE else FileSystemWriter(path, thread_count=1)
    )
    dcp_save(state, storage_writer=writer, no_dist=not dist.is_initialized())


def load(reader: str, state: Any, path: Path) -> Any:
    """Load, and return the reader."""
    alone = not dist.is_initialized()
    if reader == STOCK:
        stock = FileSystemReader(path)
        dcp_load(state, storage_reader=stock, no_dist=alone)
        return stock
    ours = pyckpt.DirectReader(path)
    if reader == LOAD:
        pyckpt.load(state, reader=ours)
    else:
        dcp_load(state, storage_reader=ours, no_dist=alone)
    return ours


def paths(directory: Path) -> dict[str, Path]:
    return {OUR_FILE: directory / "ours", STOCK_FILE: directory / "stock"}


def save_both(state: Any, directory: Path) -> dict[str, Path]:
    for file, path in paths(directory).items():
        remove(path)
        save(state, path, file)
    return paths(directory)


def loaders(state: State, files: dict[str, Path], readers: tuple[str, ...]) -> list[Variant]:
    """Every reader on every kind of file. All load into the same tensors."""
    destination = zeros_like(state)

    def sample(reader: str, path: Path) -> Sample:
        return timed(lambda: load(reader, destination, path))

    def check(name: str) -> None:
        must_equal(destination, state, name)
        set_zero(destination)

    return [
        Variant(
            f"{reader}, {file}",
            run=lambda reader=reader, path=path: sample(reader, path),  # type: ignore[misc]
            check=lambda name=f"{reader}, {file}": check(name),  # type: ignore[misc]
        )
        for reader in readers
        for file, path in files.items()
    ]


# --- sections ---------------------------------------------------------------------------------


def measure_large(report: Report, options: Options) -> None:
    state = large_state(options.size)
    size = nbytes(state)
    files = save_both(state, options.directory)
    variants = loaders(state, files, (LOAD, READER, STOCK))
    if report.machine["fio"]:
        own = options.directory / "fio"
        fio(own, size, "write")
        (ours,) = files[OUR_FILE].glob("*.distcp")
        variants = [
            Variant(FIO[0], run=lambda: fio(own, size, "read")),
            Variant(FIO[1], run=lambda: fio(ours, size, "read")),
            *variants,
        ]
    report.add(
        "large",
        interleave(
            variants,
            options.rounds,
            before=lambda: drop_page_cache(options.directory),
            console=report.console,
            title=f"{size / MIB:,.0f} MiB in {LARGE_TENSORS} tensors",
        ),
    )
    remove(options.directory / "fio")
    report.table(
        "Large tensors",
        "large",
        {
            "seconds": gigabytes_per_second(size),
            "cpu_seconds": cpu_seconds_per_gigabyte(size),
        },
    )
    fastest = report.best("large", FIO)
    for reader in (LOAD, READER):
        for kind in FILES:
            name = f"{reader}, {kind}"
            report.target(
                f"large: {name}: GB/s over fio's ({fastest})",
                report.ratio("large", fastest, name),
                at_least=0.85,
            )
    for reader in (LOAD, READER):
        for kind in FILES:
            name = f"{reader}, {kind}"
            report.target(
                f"large: {name}: GB/s over {STOCK}'s on the same file",
                report.ratio("large", f"{STOCK}, {kind}", name),
                at_least=2.5,
                unit="x",
            )
    cpu = report.median("large", f"{LOAD}, {OUR_FILE}", "cpu_seconds")
    report.target(
        f"large: CPU seconds of {LOAD} a GB",
        None if cpu is None else cpu / size * 1e9,
        at_most=0.13,
    )


def measure_small(report: Report, options: Options) -> None:
    state = small_state()
    items = SMALL_TENSORS + SCALARS
    files = save_both(state, options.directory)
    report.add(
        "small",
        interleave(
            loaders(state, files, (LOAD, READER, STOCK)),
            options.rounds,
            before=lambda: drop_page_cache(options.directory),
            console=report.console,
            title=f"{SMALL_TENSORS:,} tensors of 16 KiB and {SCALARS:,} scalars",
        ),
    )
    report.table("Small items", "small", {"seconds": ("ms", lambda seconds: seconds * 1e3)})
    for kind in FILES:
        ours = report.median("small", f"{LOAD}, {kind}") or math.nan
        report.note(f"{LOAD}, {kind}: {ours / items * 1e6:.1f} microseconds an item")
        report.target(
            f"small: {LOAD} faster than {STOCK}, {kind}",
            report.ratio("small", f"{STOCK}, {kind}", f"{LOAD}, {kind}"),
            at_least=5,
            unit="x",
        )


def measure_mixed(report: Report, options: Options) -> None:
    state = mixed_state()
    files = save_both(state, options.directory)
    report.add(
        "mixed",
        interleave(
            loaders(state, files, (LOAD, STOCK)),
            options.rounds,
            before=lambda: drop_page_cache(options.directory),
            console=report.console,
            title=f"{SMALL_TENSORS:,} tensors of 16 KiB and {SCALARS:,} Python floats",
        ),
    )
    report.table(
        "Mixed items",
        "mixed",
        {
            "seconds": ("ms", lambda seconds: seconds * 1e3),
            "cpu_seconds": ("CPU ms", lambda seconds: seconds * 1e3),
        },
    )
    report.target(
        f"mixed: CPU time of {STOCK} over that of {LOAD}, {OUR_FILE}",
        report.ratio("mixed", f"{STOCK}, {OUR_FILE}", f"{LOAD}, {OUR_FILE}", "cpu_seconds"),
        at_least=20,
        unit="x",
    )


def measure_verify(report: Report, options: Options) -> None:
    state = large_state(options.size)
    files = save_both(state, options.directory)
    destination = zeros_like(state)

    def sample(verify: Any, path: Path) -> Sample:
        return timed(lambda: pyckpt.load(destination, path, verify=verify))

    def check() -> None:
        must_equal(destination, state, LOAD)
        set_zero(destination)

    for kind, path in files.items():
        group = f"verify {kind}"
        report.add(
            group,
            interleave(
                [
                    Variant(
                        verify,
                        run=lambda verify=verify, path=path: sample(verify, path),  # type: ignore[misc]
                        check=check,
                    )
                    for verify in ("items", "none")
                ],
                2 * options.rounds,
                before=lambda: drop_page_cache(options.directory),
                console=report.console,
                title=f"{options.size / MIB:,.0f} MiB by {LOAD}, verified or not, {kind}",
                quiet=True,
            ),
        )
        report.table(
            f"Verification, {kind}", group, {"seconds": gigabytes_per_second(nbytes(state))}
        )
        ratio = report.ratio(group, "items", "none")
        report.target(
            f"verification: what it adds to the time of a load, {kind}",
            None if ratio is None else 100 * (ratio - 1),
            at_most=5,
            unit="%",
        )


# --- other ranks than saved -------------------------------------------------------------------

_SAVED_BY = 4
_LOADED_BY = (8, 3, 1)
# Rows that no number of ranks divides evenly among them, of a few MiB each.
_SHAPES = ((1024, 1024), (1000, 1333), (4099, 257), (8192, 128), (2000, 700), (513, 2048))


def _sharded_state() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        f"weight.{i}": distribute_tensor(_weight(i, shape), mesh, [Shard(0)])
        for i, shape in enumerate(_SHAPES)
    }


def _weight(number: int, shape: tuple[int, int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).add_(number).reshape(shape)


def _save_sharded(rank: int, ranks: int, directory: Path) -> None:
    with process_group(rank, ranks, directory / "rendezvous-save"):
        state = _sharded_state()
        for file, path in paths(directory).items():
            save(state, path, file)


def _load_sharded(
    rank: int, ranks: int, directory: Path, reader: str, path: Path, number: int
) -> Sample:
    with process_group(rank, ranks, directory / f"rendezvous-{number}"):
        expected = _sharded_state()
        found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        load(reader, found, path)  # what this imports is not to be counted below
        for name, tensor in expected.items():
            if not torch.equal(_local(found[name]), _local(tensor)):
                raise WrongBytes(f"{reader}, {path.name}, rank {rank} of {ranks}: {name}")
        dist.barrier()
        if rank == 0:
            drop_page_cache(directory)
        dist.barrier()
        before = io_counters()
        start = time.perf_counter()
        used = load(reader, found, path)
        seconds = time.perf_counter() - start
        after = io_counters()
    statistics = getattr(used, "statistics", None)
    return {
        "seconds": seconds,
        "needed_bytes": sum(_local(tensor).nbytes for tensor in expected.values()),
        "statistics_bytes": math.nan if statistics is None else statistics.bytes,
        "rchar_bytes": after["rchar"] - before["rchar"],
        "read_bytes": after["read_bytes"] - before["read_bytes"],
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    local: torch.Tensor = tensor.to_local()
    return local


def measure_reshard(report: Report, options: Options) -> None:
    directory = options.directory / "sharded"
    directory.mkdir()
    in_children(_SAVED_BY, _save_sharded, _SAVED_BY, directory)
    size = 4 * sum(math.prod(shape) for shape in _SHAPES)
    report.console.print(
        f"[bold]{size / MIB:.0f} MiB in {len(_SHAPES)} row-sharded DTensors, saved by "
        f"{_SAVED_BY} ranks[/]"
    )
    count = 0
    for ranks in _LOADED_BY:
        group = f"reshard {_SAVED_BY} to {ranks}"
        for reader in (LOAD, STOCK):
            for kind, path in paths(directory).items():
                count += 1
                of_ranks = in_children(ranks, _load_sharded, ranks, directory, reader, path, count)
                total = {key: sum(sample[key] for sample in of_ranks) for key in of_ranks[0]}
                needed = total["needed_bytes"]
                sample = {
                    "seconds": max(sample["seconds"] for sample in of_ranks),
                    "needed_bytes": needed,
                    "rchar_over_needed": total["rchar_bytes"] / needed,
                    "read_bytes_over_needed": total["read_bytes"] / needed,
                }
                if reader == LOAD:
                    sample["read_over_needed"] = total["statistics_bytes"] / needed
                report.add(group, {f"{reader}, {kind}": [sample]})
        report.table(
            f"Saved by {_SAVED_BY} ranks, loaded by {ranks}: bytes read over bytes needed",
            group,
            {
                "read_over_needed": ("statistics", lambda ratio: ratio),
                "rchar_over_needed": ("rchar", lambda ratio: ratio),
                "read_bytes_over_needed": ("read_bytes", lambda ratio: ratio),
                "seconds": ("ms", lambda seconds: seconds * 1e3),
            },
        )
        for kind in FILES:
            report.target(
                f"reshard {_SAVED_BY} to {ranks}: bytes read over bytes needed, {kind}",
                report.median(group, f"{LOAD}, {kind}", "read_over_needed"),
                at_most=1.1,
            )
    remove(directory)


# --- memory -----------------------------------------------------------------------------------


def _save_in_child(rank: int, size: int, directory: Path) -> None:
    save_both(large_state(size, fill=False), directory)


def _load_in_child(rank: int, reader: str, path: Path, size: int, created: bool) -> Sample:
    if not created:
        destination = large_state(size, fill=False)
        return peak_growth(lambda: load(reader, destination, path))

    def create_and_load() -> None:
        if reader == LOAD:
            load(reader, {"model": {}}, path)
            return
        count = size // LARGE_TENSORS // 4
        state = {"model": {f"weight.{i:03d}": torch.empty(count) for i in range(LARGE_TENSORS)}}
        load(reader, state, path)

    return peak_growth(create_and_load)


def measure_memory(report: Report, options: Options) -> None:
    size = options.size // LARGE_TENSORS // 4 * 4 * LARGE_TENSORS
    in_children(1, _save_in_child, size, options.directory)
    ring = pyckpt.Engine.slot_bytes * pyckpt.Engine.io_threads

    def in_child(reader: str, path: Path, created: bool) -> Sample:
        sample: Sample = in_children(1, _load_in_child, reader, path, size, created)[0]
        return sample

    for created in (False, True):
        how = "created" if created else "in place"
        group = f"memory, {how}"
        report.add(
            group,
            interleave(
                [
                    Variant(
                        f"{reader}, {kind}",
                        run=lambda reader=reader, path=path, created=created: in_child(  # type: ignore[misc]
                            reader, path, created
                        ),
                    )
                    for reader in (LOAD, STOCK)
                    for kind, path in paths(options.directory).items()
                ],
                min(3, options.rounds),
                before=lambda: drop_page_cache(options.directory),
                console=report.console,
                title=f"peak memory of a load of {size / MIB:,.0f} MiB, {how}, in new processes",
                quiet=True,
            ),
        )
        report.table(
            f"Memory, {how}", group, {"growth_bytes": ("peak growth MiB", lambda size: size / MIB)}
        )
        limit = ring / MIB + 64 + (size / MIB if created else 0)
        for kind in FILES:
            growth = report.median(group, f"{LOAD}, {kind}", "growth_bytes")
            report.target(
                f"memory: peak growth of a load, {how}, {kind} "
                f"({'destination + ' if created else ''}ring + 64 MiB)",
                None if growth is None else growth / MIB,
                at_most=limit,
                unit="MiB",
            )


SECTIONS: dict[str, Callable[[Report, Options], None]] = {
    "large": measure_large,
    "small": measure_small,
    "mixed": measure_mixed,
    "verify": measure_verify,
    "reshard": measure_reshard,
    "memory": measure_memory,
}

if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(run("load", SECTIONS, __doc__))
