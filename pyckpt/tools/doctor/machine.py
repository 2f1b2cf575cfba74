"""Memory, processors, and the limits of this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from pyckpt.engine import Engine
from pyckpt.tools.doctor.finding import Finding

__all__ = ["Limits", "look", "read_limits"]

GIB = 1 << 30
FEW_FILES = 4096
FEW_THREADS = 64


@dataclass(frozen=True)
class Limits:
    """What the process may use. None: there is no limit, or it is not known."""

    memory: int
    """Bytes of the machine."""
    available: int
    """Bytes that are free, or can be made free."""
    processors: int
    """On which the process may run."""
    pinned: int
    """Bytes that pyckpt takes for copies, at most: ``max_pinned_bytes`` of the default engine."""
    cgroup_memory: int | None = None
    """Bytes, of the process's control group."""
    cgroup_processors: float | None = None
    """Processors' worth of time."""
    cgroup_tasks: int | None = None
    locked: int | None = None
    """Bytes (``ulimit -l``)."""
    files: int | None = None
    """Open files (``ulimit -n``)."""
    threads: int | None = None
    """Of the user (``ulimit -u``)."""
    huge_pages: str = ""
    """The setting of transparent huge pages; empty if the kernel has none."""
    nodes: int = 1
    """Of memory (NUMA)."""


def look() -> Iterator[Finding]:
    """All findings of this module."""
    engine = Engine()
    try:
        pinned = engine.native.arena_max_bytes
    finally:
        engine.close()
    yield from judge(read_limits(pinned), on_cuda=torch.cuda.is_available())


def read_limits(pinned: int, root: Path = Path("/")) -> Limits:
    """What the kernel says, by its files below ``root``."""
    sizes = dict(_sizes(root / "proc/meminfo"))
    groups = _groups(root)
    return Limits(
        memory=sizes.get("MemTotal", 0),
        available=sizes.get("MemAvailable", 0),
        processors=len(os.sched_getaffinity(0)),
        pinned=pinned,
        cgroup_memory=_least(
            groups, "memory.max", "memory/memory.limit_in_bytes", sizes.get("MemTotal")
        ),
        cgroup_processors=_quota(groups),
        cgroup_tasks=_least(groups, "pids.max", "pids/pids.max", 1 << 22),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        files=_limit(resource.RLIMIT_NOFILE),
        threads=_limit(resource.RLIMIT_NPROC),
        huge_pages=_chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        nodes=_count(root / "sys/devices/system/node/online"),
    )


def judge(limits: Limits, *, on_cuda: bool) -> Iterator[Finding]:
    """What the limits mean for saves and loads."""
    yield from _memory(limits)
    yield from _locked(limits, on_cuda)
    yield from _processors(limits)
    if limits.files is not None and limits.files < FEW_FILES:
        yield Finding(
            "open files",
            "warning",
            f"{limits.files} at most; a load opens all files of a checkpoint that it reads from, "
            "one for each rank that saved",
            "ulimit -n 65536 (LimitNOFILE= of systemd, --ulimit nofile= of Docker)",
        )
    else:
        yield Finding("open files", "good", f"{_or_any(limits.files)} at most")
    tasks = min((n for n in (limits.threads, limits.cgroup_tasks) if n is not None), default=None)
    if tasks is not None and tasks < FEW_THREADS:
        yield Finding(
            "threads",
            "warning",
            f"{tasks} at most; an engine starts about 16, and each save several",
            "raise ulimit -u, or pids.max of the control group (--pids-limit of Docker)",
        )
    else:
        yield Finding("threads", "good", f"{_or_any(tasks)} at most")


def _memory(limits: Limits) -> Iterator[Finding]:
    gib = f"{limits.memory / GIB:.1f} GiB"
    if limits.cgroup_memory is not None:
        gib += f", of which this control group may use {limits.cgroup_memory / GIB:.1f} GiB"
    pinned = f"copies of asynchronous saves take up to {limits.pinned / GIB:.1f} GiB"
    if limits.available < limits.pinned:
        yield Finding(
            "memory",
            "warning",
            f"{gib}; {limits.available / GIB:.1f} GiB are available, and {pinned}",
            "free memory, or call pyckpt.configure(max_pinned_bytes=...)",
        )
    else:
        yield Finding("memory", "good", f"{gib}; {pinned}")
    if limits.huge_pages == "never":
        yield Finding(
            "huge pages",
            "warning",
            "never: filling and registering memory takes longer on pages of 4 KiB",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    else:
        yield Finding("huge pages", "good", limits.huge_pages or "the kernel has no setting")
    if limits.nodes > 1:
        yield Finding(
            "memory nodes",
            "note",
            f"{limits.nodes}: memory of another node is slower; pyckpt takes that of its GPU's",
            "bind each rank to its GPU's node (numactl --cpunodebind)",
        )
    else:
        yield Finding("memory nodes", "good", "1")


def _locked(limits: Limits, on_cuda: bool) -> Iterator[Finding]:
    if limits.locked is None or limits.locked >= limits.pinned:
        yield Finding("locked memory", "good", f"{_or_any(limits.locked, GIB)} at most")
        return
    yield Finding(
        "locked memory",
        "warning" if on_cuda else "note",
        f"{limits.locked / GIB:.2f} GiB at most, less than the {limits.pinned / GIB:.1f} GiB that "
        "pyckpt may register with CUDA; not each driver and container counts these",
        "if registering fails: ulimit -l unlimited (LimitMEMLOCK=infinity of systemd, "
        "--ulimit memlock=-1 of Docker), or pyckpt.configure(max_pinned_bytes=...)"
        if on_cuda
        else "without a GPU nothing is registered",
    )


def _processors(limits: Limits) -> Iterator[Finding]:
    quota = limits.cgroup_processors
    if quota is not None and quota < limits.processors:
        yield Finding(
            "processors",
            "warning",
            f"{limits.processors}, with the time of {quota:g}: threads are stopped when it is used "
            "up, those of the training too",
            "raise the control group's limit (--cpus of Docker), or "
            f"pyckpt.configure(io_threads={max(1, int(quota))})",
        )
    else:
        yield Finding("processors", "good", str(limits.processors))


def _or_any(limit: int | None, unit: int = 1) -> str:
    if limit is None:
        return "any number"
    return str(limit) if unit == 1 else f"{limit / unit:.2f} GiB"


# --- what the kernel says ---------------------------------------------------------------------


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _sizes(file: Path) -> Iterator[tuple[str, int]]:
    with suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
                yield name, int(words[0]) * 1024


def _groups(root: Path) -> list[tuple[Path, str]]:
    """The directories of the process's control groups, from its own up to the root, each with the
    controllers of version 1, or "" for version 2."""
    top = root / "sys/fs/cgroup"
    found: list[tuple[Path, str]] = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                base = top / controller if controller else top
                # In a container, the path is the host's, and the group is mounted at the top.
                own = base / path.lstrip("/")
                for directory in (own, *own.parents):
                    found.append((directory, controller))
                    if directory == base:
                        break
    return found


def _least(
    groups: list[tuple[Path, str]], unified: str, divided: str, unlimited: int | None
) -> int | None:
    """The least limit of the groups; None if none is under ``unlimited``."""
    controller, name = divided.split("/")
    values = []
    for directory, kind in groups:
        if kind in ("", controller):
            with suppress(OSError, ValueError):
                values.append(int((directory / (name if kind else unified)).read_text()))
    least = min(values, default=None)
    return None if least is None or (unlimited is not None and least >= unlimited) else least


def _quota(groups: list[tuple[Path, str]]) -> float | None:
    quotas = []
    for directory, kind in groups:
        with suppress(OSError, ValueError):
            if kind == "":
                quota, period = (directory / "cpu.max").read_text().split()
            elif kind == "cpu":
                quota = (directory / "cpu.cfs_quota_us").read_text()
                period = (directory / "cpu.cfs_period_us").read_text()
            else:
                continue
            if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _chosen(file: Path) -> str:
    """``madvise`` of ``always [madvise] never``."""
    with suppress(OSError):
        for word in file.read_text().split():
            if word.startswith("["):
                return word.strip("[]")
    return ""


def _count(file: Path) -> int:
    """How many numbers a list of ranges such as ``0-1,4`` has."""
    count = 0
    with suppress(OSError, ValueError):
        for part in file.read_text().strip().split(","):
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    return max(1, count)
