"""Sections of `gpu.py`: staging, writing and loading, offloading."""

from __future__ import annotations

import importlib.util
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import (
    MIB,
    Sample,
    State,
    Variant,
    drop_page_cache,
    gigabytes_per_second,
    nbytes,
    remove,
    set_zero,
    zeros_like,
)
from _gpu_common import (
    BARE,
    BESIDE,
    OURS,
    Setting,
    must_equal_on_device,
    tensors_of,
    timed_on_device,
)
from _savers import DefaultStagers, stagers_serve_once
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import pyckpt
from pyckpt.optim import Offloader

DEFAULT = "DefaultStager, as in async_save"
DEFAULT_ALL = "DefaultStager, all options"
RIVAL = "torch_checkpointing's stager"


def _milliseconds(seconds: float) -> float:
    return seconds * 1e3


# --- staging ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staging:
    """A state to copy out of the GPU, and what is asked of that."""

    name: str
    count: int
    size: int
    """Bytes of a tensor."""
    at_least: float | None = None
    """Speed over that of the bare copy."""
    at_most_ms: float | None = None
    """Until the copies are there."""


def measure_staging_large(setting: Setting) -> None:
    count, total = setting.scale.large_tensors, setting.scale.staging_bytes
    _measure_staging_of(setting, Staging("large", count, total // count, at_least=0.95), 3)


def measure_staging_small(setting: Setting) -> None:
    scale = setting.scale
    staging = Staging("small", scale.small_tensors, scale.small_tensor_bytes, at_most_ms=40)
    _measure_staging_of(setting, staging, scale.rounds)


def measure_staging_many(setting: Setting) -> None:
    count, total = setting.scale.small_tensors, setting.scale.staging_bytes
    _measure_staging_of(setting, Staging("many", count, total // count, at_least=0.9), 3)


def _measure_staging_of(setting: Setting, staging: Staging, rounds: int) -> None:
    """Ours beside the bare copy, to the end; then each peer, beside the bare copy again."""
    group, rounds = f"staging {staging.name}", min(rounds, setting.scale.rounds)
    state = tensors_of(setting, staging.count, staging.size)
    bare = _bare_variant(setting, nbytes(state))
    _measure_ours(setting, staging, state, bare, group, rounds)
    _measure_peers(setting, staging, state, bare, group)
    _measure_cold(setting, staging, state, group)


def _engine_for(staging: Staging, state: State) -> pyckpt.Engine:
    return pyckpt.Engine(max_pinned_bytes=nbytes(state) + staging.count * 4096 + 256 * MIB)


def _measure_ours(
    setting: Setting, staging: Staging, state: State, bare: Variant, group: str, rounds: int
) -> None:
    report, total = setting.report, nbytes(state)
    with _engine_for(staging, state) as engine:
        stager = pyckpt.PinnedStager(engine=engine)
        try:
            for name, action in (
                ("prewarm", lambda: stager.prewarm(state)),
                ("first, after prewarm", lambda: stager.stage(state).result()),
            ):
                report.add(f"{group}, memory", {name: [timed_on_device(setting, action)]})
            setting.measure(
                group,
                [bare, _staging_variant(setting, OURS, state, stager.stage)],
                rounds=rounds,
                before=setting.synchronize,
                title=f"{group}: {staging.count:,} tensors, {total / 1e9:.2f} GB",
            )
        finally:
            stager.close()
    _show_staging(setting, group, total)
    if staging.at_least is not None:
        report.target(
            f"{group}: GB/s over that of the {BARE}",
            report.ratio(group, BARE, OURS),
            at_least=staging.at_least,
        )
    if staging.at_most_ms is not None:
        seconds = report.median(group, OURS)
        report.target(
            f"{group}: until the copies are there",
            None if seconds is None else _milliseconds(seconds),
            at_most=staging.at_most_ms,
            unit="ms",
        )
    blocked = report.median(group, OURS, "blocked_seconds")
    report.target(
        f"{group}: blocked, a tensor",
        None if blocked is None else blocked * 1e6 / max(1000, staging.count),
        at_most=1.5,
        unit="us",
    )


def _measure_peers(
    setting: Setting, staging: Staging, state: State, bare: Variant, group: str
) -> None:
    """One peer at a time, whose memory goes before the next one's is taken."""
    report, total = setting.report, nbytes(state)
    if stagers_serve_once():
        report.note(
            f"DefaultStager of torch {torch.__version__} serves one save: each has another, which "
            f"takes its memory anew. The last one's goes outside of the timing"
        )
    # Pageable or newly registered memory takes 2 GB/s, and Python its time for each tensor; it is
    # run for its check, and once more.
    estimate = 2 * (total / 2e9 + staging.count * 1e-4)
    for name, make in _stagers(setting, staging, total):
        if not setting.time_for(estimate, f"{group} by {name}"):
            continue
        peer: Any = None
        beside = f"{group}{BESIDE}{name}"
        try:
            peer = make()
            if peer is None:
                continue
            let_go = getattr(peer, "let_go", lambda: None)
            variant = _staging_variant(setting, name, state, peer.stage, let_go, peer=True)
            setting.measure(
                beside,
                [bare, variant],
                rounds=min(2, setting.scale.rounds),
                before=setting.synchronize,
                title=f"{group}: {name}",
            )
            _show_staging(setting, beside, total)
        except Exception as error:
            setting.note_failure(f"{group}: {name}", error)
        finally:
            if peer is not None:
                peer.close()


def _stagers(setting: Setting, staging: Staging, total: int) -> list[tuple[str, Callable[[], Any]]]:
    def default_all() -> Any:
        return DefaultStagers(
            StagingOptions(
                use_pinned_memory=setting.cuda,
                use_shared_memory=setting.shared_memory_for(total, staging.count, DEFAULT_ALL),
                use_async_staging=True,
                use_non_blocking_copy=setting.cuda,
            )
        )

    def rival() -> Any:
        # Its stager alone: no process of it is started, nor needed.
        if not setting.cuda or importlib.util.find_spec("torch_checkpointing") is None:
            setting.report.note(f"left out: {RIVAL}: not installed, or no GPU")
            return None
        if not setting.shared_memory_for(2 * total, staging.count, RIVAL):
            return None
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.staging import DefaultStager as RivalStager

        return RivalStager(CheckpointStagerConfig())

    return [
        (DEFAULT_ALL, default_all),
        (RIVAL, rival),
        (DEFAULT, lambda: DefaultStagers(StagingOptions(False, False, False, False))),
    ]


def _show_staging(setting: Setting, group: str, total: int) -> None:
    # A peer that failed may have left nothing to show.
    if group in setting.report.results:
        setting.report.table(
            f"Staging, {group}",
            group,
            {
                "seconds": gigabytes_per_second(total),
                "blocked_seconds": ("blocked ms", _milliseconds),
            },
        )


def _bare_variant(setting: Setting, total: int) -> Variant:
    """One copy of as many bytes: what the bus can do."""
    source = torch.ones(total, dtype=torch.uint8, device=setting.device)
    target = torch.empty(total, dtype=torch.uint8, pin_memory=setting.cuda)
    return Variant(
        BARE,
        run=lambda: timed_on_device(setting, lambda: target.copy_(source, non_blocking=True)),
    )


def _staging_variant(
    setting: Setting,
    name: str,
    state: State,
    stage: Callable[[State], Any],
    let_go: Callable[[], None] = lambda: None,
    *,
    peer: bool = False,
) -> Variant:
    # The copies are let go of before the next are made, as after a save.
    copies: list[Any] = []

    def run() -> Sample:
        setting.synchronize()
        start = time.perf_counter()
        result = stage(state)
        blocked = time.perf_counter() - start
        if isinstance(result, Future):
            result = result.result()
        seconds = time.perf_counter() - start
        copies.append(result)
        return {"seconds": seconds, "blocked_seconds": blocked}

    def check() -> None:
        must_equal_on_device(copies[0], state, name)

    def clean() -> None:
        copies.clear()
        let_go()

    return Variant(name, run=run, check=check, clean=clean, peer=peer)


def _measure_cold(setting: Setting, staging: Staging, state: State, group: str) -> None:
    """What the first save takes that nothing was made ready for."""
    name = "first, without prewarm"
    if setting.time_for(nbytes(state) / 1.5e9, f"{group}, {name}"):
        with _engine_for(staging, state) as engine:
            stager = pyckpt.PinnedStager(engine=engine)
            cold = timed_on_device(setting, lambda: stager.stage(state).result())
            stager.close()
        setting.report.add(f"{group}, memory", {name: [cold]})
    setting.report.table(
        f"Taking and registering memory, {group}",
        f"{group}, memory",
        {"seconds": ("ms", _milliseconds)},
    )


# --- writing and loading ----------------------------------------------------------------------

_IO_BLOCK = 8 * MIB
_IO_DEPTH = 16
BARE_DISK = "bare direct I/O, 8 MiB blocks, depth 16"


@contextmanager
def _bare_file(path: Path, size: int, flags: int) -> Iterator[Callable[[Callable[..., int]], None]]:
    """Gives a function that does so many blocks of a file by pwritev or preadv, in 16 threads."""
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:  # a file system without direct I/O
        descriptor = os.open(path, flags, 0o644)
    blocks = -(-size // _IO_BLOCK)
    buffers = [mmap.mmap(-1, _IO_BLOCK) for _ in range(_IO_DEPTH)]

    def work(operate: Callable[..., int], lane: int) -> None:
        for block in range(lane, blocks, _IO_DEPTH):
            if operate(descriptor, [buffers[lane]], block * _IO_BLOCK) != _IO_BLOCK:
                raise RuntimeError(f"{path}: a short transfer")

    def all_lanes(operate: Callable[..., int]) -> None:
        with ThreadPoolExecutor(_IO_DEPTH) as pool:
            for done in [pool.submit(work, operate, lane) for lane in range(_IO_DEPTH)]:
                done.result()

    try:
        yield all_lanes
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        for buffer in buffers:
            buffer.close()


def _bare_write(path: Path, size: int) -> None:
    with _bare_file(path, size, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as do:
        do(os.pwritev)


def _bare_read(path: Path, size: int) -> None:
    with _bare_file(path, size, os.O_RDONLY) as do:
        do(os.preadv)


STOCK_THREADS = (1, 4)


def measure_storage(setting: Setting) -> None:
    """Synchronous saves and loads of a state on the device."""
    state = tensors_of(setting, 64, setting.scale.storage_bytes // 64)
    _measure_load(setting, state)
    _measure_write(setting, state)


def _measure_write(setting: Setting, state: State) -> None:
    report, path = setting.report, setting.path
    writers: dict[str, Callable[[], Any]] = {OURS: lambda: pyckpt.DirectWriter(path)}
    for threads in STOCK_THREADS:
        writers[_stock(threads)] = lambda threads=threads: FileSystemWriter(  # type: ignore[misc]
            path, thread_count=threads
        )

    def check(name: str) -> None:
        found = zeros_like(state)
        dcp_load(found, storage_reader=FileSystemReader(path), no_dist=True)
        must_equal_on_device(found, state, name)

    def variant(name: str, writer: Callable[[], Any]) -> Variant:
        return Variant(
            name,
            run=lambda: timed_on_device(
                setting, lambda: dcp_save(state, storage_writer=writer(), no_dist=True)
            ),
            check=lambda: check(name),
            clean=lambda: remove(path),
            peer=name != OURS,
        )

    size = nbytes(state)
    bare = Variant(
        BARE_DISK,
        run=lambda: timed_on_device(setting, lambda: _bare_write(path, size)),
        clean=lambda: remove(path),
    )
    setting.measure(
        "write",
        [bare, *(variant(*item) for item in writers.items())],
        rounds=min(2, setting.scale.rounds),
        before=os.sync,
        title=f"dcp.save of {size / 1e9:.2f} GB on the device, fsync",
        quiet=False,
    )
    report.table("Writing", "write", {"seconds": gigabytes_per_second(size)})
    best = report.best("write", [_stock(threads) for threads in STOCK_THREADS])
    report.target("write: GB/s over stock's best", report.ratio("write", best, OURS), at_least=1)
    report.target(
        "write: GB/s over bare direct I/O", report.ratio("write", BARE_DISK, OURS), at_least=0.9
    )


def _stock(threads: int) -> str:
    return f"FileSystemWriter, thread_count={threads}"


def _measure_load(setting: Setting, state: State) -> None:
    report, path = setting.report, setting.path
    dcp_save(state, storage_writer=pyckpt.DirectWriter(path), no_dist=True)
    found = zeros_like(state)
    size = nbytes(state)
    bare_file = setting.directory / "bare"
    _bare_write(bare_file, size)
    loaders: dict[str, Callable[[], object]] = {
        "pyckpt.load": lambda: pyckpt.load(found, path),
        "dcp.load, FileSystemReader": lambda: dcp_load(
            found, storage_reader=FileSystemReader(path), no_dist=True
        ),
    }

    def check(name: str) -> None:
        must_equal_on_device(found, state, name)
        set_zero(found)

    def variant(name: str, load: Callable[[], object]) -> Variant:
        return Variant(
            name,
            run=lambda: timed_on_device(setting, load),
            check=lambda: check(name),
            peer=name != next(iter(loaders)),
        )

    bare = Variant(
        BARE_DISK, run=lambda: timed_on_device(setting, lambda: _bare_read(bare_file, size))
    )
    setting.measure(
        "load",
        [bare, *(variant(*item) for item in loaders.items())],
        rounds=min(2, setting.scale.rounds),
        before=lambda: drop_page_cache(setting.directory),
        title=f"loading {size / 1e9:.2f} GB to the device, page cache dropped",
        quiet=False,
        spare=12 * size / 1e9,
    )
    remove(path)
    remove(bare_file)
    report.table("Loading", "load", {"seconds": gigabytes_per_second(size)})
    ours, stock = loaders
    report.target("load: GB/s over stock's", report.ratio("load", stock, ours), at_least=1)
    report.target(
        "load: GB/s over bare direct I/O", report.ratio("load", BARE_DISK, ours), at_least=0.9
    )


# --- offloading -------------------------------------------------------------------------------

LOOP = "state.cpu(), state.cuda()"


def measure_offload(setting: Setting) -> None:
    """AdamW's state out to the host and back, beside the loop that people write."""
    report, device = setting.report, setting.device
    count = 64
    elements = setting.scale.offload_bytes // 2 // count // 4
    parameters = [torch.nn.Parameter(torch.ones(elements, device=device)) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1)
    optimizer.step()
    expected = _moments(optimizer)
    size = nbytes(expected)
    offloader = Offloader(optimizer)
    released: dict[str, list[float]] = {}

    def allocated() -> int:
        return torch.cuda.memory_allocated(device) if setting.cuda else 0

    def sample(out: Callable[[], object], back: Callable[[], object], name: str) -> Sample:
        before = allocated()
        there = timed_on_device(setting, out)
        released.setdefault(name, []).append(before - allocated())
        here = timed_on_device(setting, back)
        return {
            "seconds": there["seconds"] + here["seconds"],
            "out_seconds": there["seconds"],
            "back_seconds": here["seconds"],
            "out_blocked_seconds": there["blocked_seconds"],
            "back_blocked_seconds": here["blocked_seconds"],
        }

    def move(to: torch.device | str) -> None:
        for entries in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                entries[key] = entries[key].to(to)

    # The loop replaces the tensors, so that each variant finds those of the one before it.
    variants = [
        Variant(
            "Offloader",
            run=lambda: sample(offloader.offload, offloader.reload, "Offloader"),
            check=lambda: must_equal_on_device(_moments(optimizer), expected, "Offloader"),
        ),
        Variant(
            LOOP,
            run=lambda: sample(lambda: move("cpu"), lambda: move(device), LOOP),
            check=lambda: must_equal_on_device(_moments(optimizer), expected, LOOP),
        ),
    ]
    # Copies of one's own to compare with, or the loop above would move them, too.
    expected = {g: {n: t.clone() for n, t in ts.items()} for g, ts in expected.items()}
    try:
        setting.measure(
            "offload",
            variants,
            rounds=setting.scale.rounds,
            before=setting.synchronize,
            title=f"AdamW's state, {size / 1e9:.2f} GB, out and back",
        )
    finally:
        offloader.close()
    report.table(
        "Offloading",
        "offload",
        {
            "out_seconds": ("out GB/s", lambda seconds: size / seconds / 1e9),
            "back_seconds": ("back GB/s", lambda seconds: size / seconds / 1e9),
            "out_blocked_seconds": ("out, blocked ms", _milliseconds),
            "back_blocked_seconds": ("back, blocked ms", _milliseconds),
        },
    )
    if setting.cuda:
        report.target(
            "offload: memory released over the state's",
            min(released["Offloader"]) / size,
            at_least=1,
        )
    report.target(
        "offload: time over the loop's", report.ratio("offload", "Offloader", LOOP), at_most=1
    )


def _moments(optimizer: torch.optim.Optimizer) -> State:
    found: State = {"exp_avg": {}, "exp_avg_sq": {}}
    for number, entries in enumerate(optimizer.state.values()):
        for key, tensors in found.items():
            tensors[str(number)] = entries[key]
    return found
