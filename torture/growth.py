"""What a process holds, sampled over a long run, and whether it grows."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from pyckpt.engine import default_engine

__all__ = ["LIMITS", "Limit", "judge", "sample", "slope", "thinned"]

_MIB = 1 << 20
_PAIRS_OF = 200  # samples that the slope looks at: 20,000 pairs


@dataclass(frozen=True)
class Limit:
    """What a quantity may do in the second half of a run.

    Attributes:
        growth: of the trend, at most, over the whole second half.
        above: how far the highest sample of the second half may lie above the highest of the first.
            A single sample may be high for a good reason, so this is wider.
    """

    growth: float
    above: float


LIMITS: Mapping[str, Limit] = {
    "memory_bytes": Limit(4 * _MIB, 24 * _MIB),
    # Copies of two saves that meet by chance take one piece more, which the engine keeps.
    "engine_bytes": Limit(0, 2 * _MIB),
    "mappings": Limit(3, 40),
    "descriptors": Limit(0.5, 2),
    "threads": Limit(0.5, 2),
    "children": Limit(0, 0),
    "shared_segments": Limit(0, 0),
    "objects": Limit(200, 3000),
    "disk_bytes": Limit(4 * _MIB, 24 * _MIB),
    "disk_entries": Limit(2, 30),
}


def sample(folder: Path) -> dict[str, int]:
    """What this process holds now, after what is not used was given back; and its files.

    Nothing may be under way. ``gc.freeze`` may have hidden the objects of imports.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {
        "memory_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * _page(),
        "engine_bytes": int(default_engine().native.arena_held_bytes),
        "mappings": Path("/proc/self/maps").read_bytes().count(b"\n"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "children": _children(),
        "shared_segments": sum(f"_{os.getpid()}_" in name for name in os.listdir("/dev/shm")),
        "objects": len(gc.get_objects()),
        "disk_bytes": _file_system_bytes(folder),
        "disk_entries": sum(1 for _ in folder.rglob("*")),
    }


def _page() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _children() -> int:
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found += len((task / "children").read_text().split())
    return found


def _file_system_bytes(folder: Path) -> int:
    """If the file system is the folder's own, with the files that were removed and are open."""
    if os.path.ismount(folder):
        status = os.statvfs(folder)
        return (status.f_blocks - status.f_bfree) * status.f_frsize
    found = 0
    for path in folder.rglob("*"):
        found += path.lstat().st_blocks * 512
    return found


def slope(values: Sequence[float]) -> float:
    """The median of the slopes between all pairs (Theil-Sen), a sample: a third of the samples may
    be anything."""
    values = thinned(values)
    pairs = combinations(range(len(values)), 2)
    slopes = [(values[b] - values[a]) / (b - a) for a, b in pairs]
    return median(slopes) if slopes else 0.0


def thinned(values: Sequence[float], most: int = _PAIRS_OF) -> Sequence[float]:
    """Every so manieth."""
    return values[:: -(-len(values) // most)] if values else values


def judge(samples: Mapping[str, Sequence[float]]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """For each quantity what it did in the second half of the run, and what grew."""
    found: dict[str, dict[str, float]] = {}
    wrong = []
    for name, limit in LIMITS.items():
        values = samples[name]
        half = len(values) // 2
        first, second = values[:half], values[half:]
        if len(first) < 2:
            wrong.append(f"{name}: {len(values)} samples tell nothing")
            continue
        some = thinned(second)
        growth = slope(second) * (len(some) - 1)
        above = max(second) - max(first)
        found[name] = {
            "growth": growth,
            "growth_limit": limit.growth,
            "above_first_half": above,
            "above_limit": limit.above,
            "highest": max(values),
        }
        if growth > limit.growth:
            wrong.append(f"{name} grew by {growth:g} in the second half; {limit.growth:g} allowed")
        if above > limit.above:
            wrong.append(f"{name}: {above:g} above the first half; {limit.above:g} allowed")
    return found, wrong
