"""The whole of it: measures, checks, and recommends settings."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyckpt.engine import Engine
from pyckpt.tools.bench.disk import BareFile, Checkpoints, scratch
from pyckpt.tools.bench.memory import cuda_variants, host_variants
from pyckpt.tools.bench.series import Series, interleave

__all__ = ["Result", "Settings", "bench", "recommend"]

MIB = 1 << 20
DEFAULT_THREADS = 8
DEFAULT_SLOT = 2 * MIB
AS_GOOD = 1.05
"""Settings that take at most this much longer than the best are as good."""
MEMORY_BENCH = 256 * MIB
LEAST = 16 * MIB


@dataclass(frozen=True)
class Settings:
    """Of an engine."""

    io_threads: int
    slot_bytes: int

    @property
    def threads(self) -> str:
        return f"{self.io_threads} thread{'s' if self.io_threads > 1 else ''}"

    @property
    def slots(self) -> str:
        return f"slots of {self.slot_bytes // MIB} MiB"

    @property
    def line(self) -> str:
        """What to write into a program."""
        given = []
        if self.io_threads != DEFAULT_THREADS:
            given.append(f"io_threads={self.io_threads}")
        if self.slot_bytes != DEFAULT_SLOT:
            given.append(f"slot_bytes={self.slot_bytes // MIB} << 20")
        return f"pyckpt.configure({', '.join(given)})" if given else ""


@dataclass(frozen=True)
class Result:
    """The result of `bench`."""

    path: str
    size: int
    """Bytes of the state that was saved and loaded."""
    rounds: int
    direct: bool
    """Whether the file system has direct I/O."""
    series: tuple[Series, ...]
    settings: Settings
    """The settings that suit this machine."""

    def as_dict(self) -> dict[str, Any]:
        """All of it, in a form for JSON."""
        return {
            "path": self.path,
            "size": self.size,
            "rounds": self.rounds,
            "direct": self.direct,
            "series": [series.as_dict() for series in self.series],
            "settings": asdict(self.settings),
            "line": self.settings.line,
        }


def bench(
    directory: str | os.PathLike[str],
    *,
    size: int = 10**9,
    quick: bool = False,
    on_step: Callable[[str], None] = lambda step: None,
) -> Result:
    """Measure what saves and loads in a directory can reach, and which settings reach it.

    What is compared takes turns, and what is saved is loaded and compared byte by byte. All files
    are in a directory of their own, which is removed, also after an error or an interrupt.

    Args:
        directory: on the file system that is measured.
        size: bytes of the state that is saved and loaded. The disk needs the room of two, and the
            memory that of three.
        quick: fewer rounds and fewer settings.
        on_step: called with what is measured next.

    Raises:
        OSError: there is not enough room, or a file cannot be written.
        ValueError: ``size`` is out of range.
        WrongBytes: what was read is not what was written.
    """
    if size < LEAST:
        raise ValueError(f"{size = } must be {LEAST} bytes or more, or nothing is measured")
    directory = Path(directory)
    _check_room(directory, size)
    rounds = 3 if quick else 5
    series: list[Series] = []
    with scratch(directory) as place:
        direct = has_direct(place)

        def measure(
            variants: Mapping[str, Callable[[], object]],
            moved: int,
            before: Callable[[], None] = lambda: None,
        ) -> list[Series]:
            found = interleave(variants, size=moved, rounds=rounds, on_step=on_step, before=before)
            series.extend(found)
            return found

        small = min(size, MEMORY_BENCH) // MIB * MIB
        with host_variants(small) as variants:
            measure(variants, small)
        with cuda_variants(small) as variants:
            if variants:
                measure(variants, small)
        _bare(place, size, direct, measure)

        checkpoints = Checkpoints(place, size)
        threads = (2, DEFAULT_THREADS) if quick else (1, 2, 4, DEFAULT_THREADS, 16)
        slots = (DEFAULT_SLOT, 8 * MIB) if quick else (MIB, DEFAULT_SLOT, 4 * MIB, 8 * MIB)
        by_threads = [Settings(count, DEFAULT_SLOT) for count in threads]
        names = [one.threads for one in by_threads]
        best = recommend(_sweep(checkpoints, by_threads, names, direct, measure))
        by_slots = [Settings(best.io_threads, slot) for slot in slots]
        names = [f"{one.slots}, {one.threads}" for one in by_slots]
        best = recommend(_sweep(checkpoints, by_slots, names, direct, measure))
        _beside_stock(checkpoints, best, measure)
    return Result(str(directory), checkpoints.size, rounds, direct, tuple(series), best)


_Measure = Callable[..., list[Series]]


def _check_room(directory: Path, size: int) -> None:
    stat = os.statvfs(directory)
    free, whole = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    # Others write to the disk meanwhile, and a full one stops them.
    need = 2 * size + max(size // 4, whole // 100)
    if free < need:
        raise OSError(
            errno.ENOSPC,
            f"{free / 1e9:.2f} GB are free, and measuring with {size / 1e9:.2f} GB needs "
            f"{need / 1e9:.2f} GB; give a smaller --size",
            str(directory),
        )
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            memory = int(line.split()[1]) * 1024
    if memory < 3 * size:
        raise ValueError(
            f"{memory / 1e9:.2f} GB of memory are available, and measuring with "
            f"{size / 1e9:.2f} GB needs {3 * size / 1e9:.2f} GB; give a smaller --size"
        )


def has_direct(place: Path) -> bool:
    """Whether the file system takes a write past the page cache."""
    try:
        BareFile(place / "direct", 0, 1).write(os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        (place / "direct").unlink(missing_ok=True)
    return True


def _bare(place: Path, size: int, direct: bool, measure: _Measure) -> None:
    """The disk without pyckpt."""
    file = BareFile(place / "bare", size, threads=4)
    moved = max(8 * MIB, size // (8 * MIB) * 8 * MIB)
    try:
        variants: dict[str, Callable[[], object]] = {}
        if direct:
            variants["plain direct writes"] = lambda: file.write(os.O_DIRECT)
        variants["plain buffered writes"] = lambda: file.write(0)
        measure(variants, moved)
        if direct:
            measure({"plain direct reads": lambda: file.read(os.O_DIRECT)}, moved)
    finally:
        (place / "bare").unlink(missing_ok=True)


def _sweep(
    checkpoints: Checkpoints,
    all_settings: Sequence[Settings],
    names: Sequence[str],
    direct: bool,
    measure: _Measure,
) -> dict[Settings, float]:
    """Seconds of a save and a load together, by settings."""
    how = "require" if direct else "auto"
    seconds = dict.fromkeys(all_settings, 0.0)
    engines = {
        one: Engine(
            io_threads=one.io_threads,
            slot_bytes=one.slot_bytes,
            max_pinned_bytes=2 * one.slot_bytes * (one.io_threads + 2),
        )
        for one in all_settings
    }
    try:
        for doing, call in (("save", checkpoints.save), ("load", checkpoints.load)):
            variants = {
                f"{doing}, {name}": _bound(call, "ours", direct=how, engine=engines[one])
                for name, one in zip(names, all_settings, strict=True)
            }
            for one, found in zip(
                all_settings,
                measure(variants, checkpoints.size, checkpoints.forget),
                strict=True,
            ):
                seconds[one] += found.bytes / found.rate / 1e9
            checkpoints.check("ours")
    finally:
        for engine in engines.values():
            engine.close()
        checkpoints.remove("ours")
    return seconds


def _bound(call: Callable[..., None], name: str, **options: Any) -> Callable[[], None]:
    return lambda: call(name, **options)


def recommend(seconds: Mapping[Settings, float]) -> Settings:
    """The defaults, if they are as good as the best; or else, of those that are, the ones with the
    fewest threads and the smallest slots."""
    limit = min(seconds.values()) * AS_GOOD
    good = [one for one, taken in seconds.items() if taken <= limit]

    def rank(one: Settings) -> tuple[bool, int, int]:
        # Of a sweep over one setting, the other is the same in all.
        is_default = one.io_threads == DEFAULT_THREADS and one.slot_bytes == DEFAULT_SLOT
        return not is_default, one.io_threads, one.slot_bytes

    return min(good, key=rank)


def _beside_stock(checkpoints: Checkpoints, settings: Settings, measure: _Measure) -> None:
    """The whole of a save and of a load, ours and stock's."""
    with Engine(io_threads=settings.io_threads, slot_bytes=settings.slot_bytes) as engine:
        # One of the two checkpoints is on the disk at a time.
        def ours() -> None:
            checkpoints.save("ours", engine=engine)

        def stock() -> None:
            checkpoints.save_stock("stock")

        def before() -> None:
            checkpoints.remove("ours")
            checkpoints.remove("stock")

        measure(
            {"pyckpt.save": ours, "dcp.save, FileSystemWriter": stock}, checkpoints.size, before
        )
        before()
        ours()
        stock()
        checkpoints.check("ours")
        checkpoints.check("stock")
        measure(
            {
                "pyckpt.load": lambda: checkpoints.load("ours", engine=engine),
                "dcp.load, FileSystemReader": lambda: checkpoints.load_stock("stock"),
            },
            checkpoints.size,
            checkpoints.forget,
        )
