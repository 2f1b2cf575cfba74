"""Records what each thread of a save or a load does, as a trace that Perfetto opens."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from pyckpt import _C
from pyckpt.timeline import Range, keep_ranges

__all__ = ["record_timeline"]


@contextmanager
def record_timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what pyckpt's threads do while the block runs, and write it to a file. ::

        with pyckpt.record_timeline("trace.json"):
            pyckpt.save(state, "checkpoints/best")

    The file is a Chrome trace. https://ui.perfetto.dev opens it; ``pyckpt timeline trace.json``
    sums it up, and draws it with ``--picture``. It has the phases of saves and loads (plan, stage,
    write, read, commit, ...) and what the engine's native threads do (copy, checksum, write, read,
    sync), each with its thread, its time and its bytes; of all saves and loads of this process that
    run meanwhile, asynchronous ones too. What has not ended by the end of the block is left out.
    The file is written then, also if the block raises.

    Each rank records for itself, to a file of its own. Times are those of the machine's monotonic
    clock, so files of the ranks of one machine fit together.

    Args:
        path: the file. An earlier one is replaced.

    Raises:
        RuntimeError: this process records already.
        OSError: the file cannot be made. This is raised before the block runs.
    """
    if not _C.start_timeline():
        raise RuntimeError("a timeline is recorded already; end that recording first")
    with ExitStack() as stack:
        stack.callback(_C.stop_timeline)
        file = stack.enter_context(Path(path).open("w"))
        stack.pop_all()
    ranges: list[Range] = []
    process = os.getpid()
    keep_ranges(ranges)
    try:
        yield
    finally:
        keep_ranges(None)
        # A forked process that leaves the block leaves the file to its parent.
        if os.getpid() == process:
            _write(file, _events(_C.stop_timeline(), ranges))


def _write(file: TextIO, events: Iterator[dict[str, Any]]) -> None:
    with file:
        file.write('{"displayTimeUnit": "ms",\n')
        other = {"clock": "CLOCK_MONOTONIC", "host": platform.node()}
        file.write(f'"otherData": {json.dumps(other)},\n"traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, events)))
        file.write("\n]}\n")


_Tracks = list[tuple[int, str, list[tuple[str, int, int, int]], int]]


def _events(tracks: _Tracks, ranges: list[Range]) -> Iterator[dict[str, Any]]:
    """The events of Chrome's trace format. Its times are microseconds."""
    process = os.getpid()

    def metadata(kind: str, thread: int, **arguments: object) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}

    def span(
        category: str, thread: int, name: str, begin: int, end: int, size: int | None
    ) -> dict[str, Any]:
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": begin / 1000,
            "dur": (end - begin) / 1000,
            "pid": process,
            "tid": thread,
            "args": {"bytes": size} if size else {},
        }

    ranges = list(ranges)  # threads that are in one still append to it
    # Python's names of its threads say more than the kernel's.
    names = {thread: name for thread, name, _, _ in tracks}
    names |= {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id}
    names |= {one.thread: one.thread_name for one in ranges}
    used = {thread for thread, *_ in tracks} | {one.thread for one in ranges}

    yield metadata("process_name", process, name=_process_name())
    for thread in sorted(used):
        yield metadata("thread_name", thread, name=names[thread])
    for thread, _, _, dropped in tracks:
        if dropped:
            yield metadata("dropped_spans", thread, spans=dropped)
    for one in ranges:
        yield span("python", one.thread, one.name, one.begin_ns, one.end_ns, one.bytes)
    for thread, _, spans, _ in tracks:
        for name, begin, end, size in spans:
            yield span("native", thread, name, begin, end, size)


def _process_name() -> str:
    if dist.is_available() and dist.is_initialized():
        return f"rank {dist.get_rank()}"
    rank = os.environ.get("RANK")
    return "pyckpt" if rank is None else f"rank {rank}"
