"""The same faults for pyckpt and for what its users would use instead, side by side.

::

    python -m torture.peers [--minutes M | --cases N] [--seed N] [--output FILE]
    python -m torture.peers --case 'SYSTEM|next@2|0:fsync:step-2/__0_0.distcp:1=error=EIO'

**Who.** pyckpt: ``dcp.save`` with ``DirectWriter``, ``pyckpt.save``, and a ``Checkpointer``, as
they are by default. PyTorch: ``dcp.save`` and ``dcp.async_save`` with a ``FileSystemWriter`` as it
is by default (``sync_files=True, overwrite=True, thread_count=1``); ``dcp.save`` with
``thread_count=2``, an option that it documents; and ``torch.save`` to a temporary file with
``os.replace`` after it. torch_checkpointing, where it is installed: its ``CheckpointManager`` with
a synchronous save, a temporary directory and a barrier, as by default; ``use_direct_io=False``,
since its default fails on ext4; and ``strict=True`` to load, since its default passes over what is
missing. Its asynchronous save runs the same writer in another process, and is not tried.

**What.** One state, of 96 KB in two tensors and a number, whose every element is the number of its
save. Situations: the *first* save into an empty directory; the *next* save, into a directory of its
own beside an earlier checkpoint; an *overwrite* of a checkpoint in its own directory; a *load*; and
a *flip*: a bit of a data file changed on the disk before a load. Saves run on 1 and on 2 ranks, in
real processes; loads on one. All time limits between ranks are the same. What a system does not
offer is not tried: torch_checkpointing refuses to overwrite, and ``torch.save`` knows nothing of
ranks.

**Faults.** One a case, at one system call on a file of the case, made by the kernel (seccomp
notification): the rank is killed before the call, or the call fails or is cut short in a way that
its manual page knows (`KINDS`). Kills also come where memory is mapped or a thread begins.
The kind is drawn first, evenly; then the call, evenly among those
of an undisturbed run to which that kind may happen. So no kind is tried on one side alone, and who
makes more calls is not hit more often. Each cell of the table gets the same number of faults that
did happen; those that did not are drawn again and do not count. The page cache outlives a killed
process: that a system does not sync its files costs it nothing here (`torture.power` is about
that).

**What becomes of it**, the first that fits:

- *hang*: a rank neither returns nor raises within 60 s.
- *wrong values*: a load returns, with values that no save had: the load that the fault hit, or one
  after it, of what looks like a complete checkpoint.
- *silent loss*: the save returned on all ranks, and what it saved cannot be loaded.
- *damage*: the checkpoint that was there before can no longer be loaded, and there is no new one in
  its place.
- *trap*: the caller was told, or killed, and the earlier checkpoint is whole; but something looks
  like a newer complete checkpoint, and cannot be loaded.
- *told*: an error was raised, or the rank was killed, and nothing is lost: the checkpoints that
  look complete are whole.
- *done*: the call returned, and did what it says, in spite of the fault.

"Looks complete" is each system's own rule: ``.metadata`` is there (DCP's, and pyckpt's), or the
final name is there (the other two). "Can be loaded" is by its own loader, undisturbed, in a new
process. What is not promised is no defect: PyTorch does not promise that an interrupted overwrite
leaves the old checkpoint, nor do peers promise to find a flipped bit. So these are situations of
their own.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib.metadata
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torture import results
from torture.cases import BOUND_S, Desk
from torture.peer_systems import SYSTEMS, PeerJob
from torture.scenarios import NEW, OLD, Stage, attempt
from torture.supervisor import Fault, Group, Key, Link, Planned, Seen, parse

__all__ = ["KINDS", "OUTCOMES", "Cell", "classify", "main"]

BAD = ("hang", "wrong values", "silent loss", "damage", "trap")
OUTCOMES = (*BAD, "told", "done")

_READS = ("read", "pread64", "preadv", "readv")
_WRITES = ("write", "pwrite64", "pwritev", "writev")
_OPENS = ("open", "openat")
_NAMES = ("rename", "renameat", "renameat2", "mkdir", "mkdirat", "link", "linkat")
_REMOVALS = ("unlink", "unlinkat", "rmdir")
_SYNCS = ("fsync", "fdatasync")
_GROWTH = (*_WRITES, *_OPENS, *_NAMES, "fallocate", "ftruncate")

KINDS: dict[str, tuple[Fault, tuple[str, ...] | None]] = {
    "kill": (Fault("kill"), None),
    "EIO": (Fault("error", errno.EIO), (*_READS, *_GROWTH, *_REMOVALS, *_SYNCS, "close")),
    "EIO, again and again": (Fault("stays", errno.EIO), (*_READS, *_GROWTH, *_SYNCS)),
    "ENOSPC": (Fault("error", errno.ENOSPC), (*_GROWTH, *_SYNCS, "close")),
    "ENOSPC, again and again": (Fault("stays", errno.ENOSPC), (*_GROWTH, *_SYNCS)),
    "EINTR": (Fault("error", errno.EINTR), (*_READS, *_WRITES, *_OPENS, *_SYNCS, "close")),
    "EMFILE": (Fault("error", errno.EMFILE), _OPENS),
    "ENOMEM": (Fault("error", errno.ENOMEM), (*_OPENS, *_NAMES, *_REMOVALS)),
    "short count": (Fault("short", 0.5), ("read", "pread64", "write", "pwrite64")),
    "shortest count": (Fault("short", 0), ("read", "pread64", "write", "pwrite64")),
}
"""The faults, and the calls to which each may happen; None: to any."""

_TRIES = 30  # how often a fault that did not happen is drawn again


class Cell(NamedTuple):
    """Whose numbers stand together."""

    system: str
    situation: str
    size: int

    def __str__(self) -> str:
        return f"{self.system}|{self.situation}@{self.size}"


def cells() -> list[Cell]:
    return [
        Cell(system.name, situation, size)
        for system in SYSTEMS.values()
        for situation in system.situations
        for size in system.sizes
        if size == 1 or situation not in ("load", "flip")
    ]


def classify(
    situation: str, seen: Sequence[Seen], earlier: tuple[str, Any], newer: tuple[str, Any]
) -> str:
    """What became of a case.

    Args:
        situation: one of the module's.
        seen: what each rank said.
        earlier: what there is of the earlier checkpoint: ("none", None), if nothing looks complete;
            ("value", its value); or ("error", why it cannot be loaded). In an overwrite, it is the
            one in its place.
        newer: the same of what the case saves. In an overwrite, it is ``earlier``.
    """
    told = [one.value for one in seen if one.kind == "said"]
    good = len(told) == len(seen) and all(kind == "ok" for kind, _ in told)
    if any(one.kind == "hung" for one in seen):
        return "hang"
    right: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
        "first": ((), (NEW,)),
        "next": ((OLD,), (NEW,)),
        "overwrite": ((OLD, NEW), (OLD, NEW)),
        "load": ((OLD,), ()),
        "flip": ((), ()),
    }
    is_load = situation in ("load", "flip")
    if is_load and any(kind == "ok" and value != OLD for kind, value in told):
        return "wrong values"
    for (kind, value), values in zip((earlier, newer), right[situation], strict=True):
        if kind == "value" and value not in values:
            return "wrong values"
    if not is_load and good and newer != ("value", NEW):
        return "silent loss"
    if situation in ("next", "overwrite", "load") and earlier[0] != "value":
        return "damage"
    if newer[0] == "error":
        return "trap"
    return "done" if good else "told"


class Bench(Desk):
    """Runs cases, one at a time."""

    def _group(
        self, stage: Stage, work: Callable[[PeerJob], Callable[[], Any]], **options: Any
    ) -> Group:
        def body(link: Link, rank: int) -> None:
            job = PeerJob(stage, rank, link.arm)
            action = work(job)
            if options:
                job.arm()
            link.say("said", attempt(action))
            link.wait()

        return Group(stage.size, body, root=str(stage.root), **options)

    def _run(self, stage: Stage, work: Callable[[PeerJob], Callable[[], Any]]) -> list[Seen]:
        group = self._group(stage, work)
        try:
            return group.phase(0, time.monotonic() + BOUND_S)
        finally:
            group.close()

    def _work(self, cell: Cell) -> Callable[[PeerJob], Callable[[], Any]]:
        system = SYSTEMS[cell.system]
        if cell.situation == "load":
            assert system.load is not None
            load = system.load
            return lambda job: load(job, 1)
        step = 1 if cell.situation == "overwrite" else 2
        return lambda job: system.save(job, step, NEW)

    def _begin(self, cell: Cell) -> Stage:
        """The directory as it is before a case."""
        stage = self._stage(cell.size)
        if cell.situation == "first":
            return stage
        system = SYSTEMS[cell.system]
        kept = self.place / "templates" / f"{list(SYSTEMS).index(cell.system)}-{cell.size}"
        if not kept.exists():
            seen = self._run(stage, lambda job: system.save(job, 1, OLD))
            if any(one.kind != "said" or one.value[0] != "ok" for one in seen):
                raise RuntimeError(f"{cell}: {seen}")
            if self.look(cell, stage.root, 1) != ("value", OLD):
                raise RuntimeError(f"{cell}: {self.look(cell, stage.root, 1)}")
            shutil.copytree(stage.root, kept)
            stage = self._stage(cell.size)
        shutil.copytree(kept, stage.root, dirs_exist_ok=True)
        return stage

    def calls(self, cell: Cell) -> list[Key]:  # type: ignore[override]
        """The calls of a run that nothing disturbs, in an order that is the same each time."""
        stage = self._begin(cell)
        group = self._group(stage, self._work(cell), record=True)
        try:
            seen = group.phase(0, time.monotonic() + BOUND_S)
        finally:
            group.close()
        if any(one.kind != "said" or one.value[0] != "ok" for one in seen):
            raise RuntimeError(f"{cell}: {seen}")
        return sorted(set(group.calls))

    def look(self, cell: Cell, root: Path, step: int) -> tuple[str, Any]:
        """What there is of a step's checkpoint, found out in a process of its own."""
        system = SYSTEMS[cell.system]
        path = system.path(root, step)
        if not system.complete(path):
            return "none", None
        (seen,) = self._run(
            self._stage(1, fresh=False), lambda job: lambda: system.look(path, cell.size)
        )
        if seen.kind != "said":
            return "error", f"the loader {seen.kind}"
        kind, value = seen.value
        return ("value", value) if kind == "ok" else ("error", value[-1])

    def run_case(self, cell: Cell, planned: Planned) -> dict[str, Any]:
        """Run a case with one fault."""
        stage = self._begin(cell)
        group = self._group(stage, self._work(cell), plan=[planned])
        begun = time.monotonic()
        try:
            seen = group.phase(0, begun + BOUND_S)
        finally:
            group.close()
        return self._judged(cell, stage, seen, str(planned), planned.hit, begun)

    def run_flip(self, cell: Cell, where: tuple[str, int]) -> dict[str, Any]:
        """Change a bit of a file, and load."""
        stage = self._begin(cell)
        name, bit = where
        with open(stage.root / name, "r+b") as file:
            file.seek(bit // 8)
            byte = file.read(1)[0]
            file.seek(bit // 8)
            file.write(bytes([byte ^ (1 << bit % 8)]))
        begun = time.monotonic()
        kind, value = self.look(cell, stage.root, 1)
        said = ("ok", value) if kind == "value" else ("error", value)
        text = f"{name}:{bit}"
        return self._judged(cell, stage, [Seen("said", said)], text, text, begun)

    def _judged(
        self, cell: Cell, stage: Stage, seen: list[Seen], text: str, hit: str, begun: float
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"case": f"{cell}|{text}", "hit": bool(hit)}
        if not hit:
            return line
        nothing = ("none", None)
        earlier = newer = nothing
        if cell.situation in ("next", "overwrite", "load"):
            earlier = self.look(cell, stage.root, 1)
        if cell.situation in ("first", "next"):
            newer = self.look(cell, stage.root, 2)
        elif cell.situation == "overwrite":
            newer = earlier
        return {
            **line,
            "outcome": classify(cell.situation, seen, earlier, newer),
            "said": repr([one.value if one.kind == "said" else one.kind for one in seen])[:600],
            "earlier": repr(earlier)[:300],
            "newer": repr(newer)[:300],
            "seconds": round(time.monotonic() - begun, 2),
        }

    def bits(self, cell: Cell) -> list[tuple[str, int]]:
        """The data files of an earlier checkpoint, with their sizes in bits."""
        root = self._begin(cell).root
        path = SYSTEMS[cell.system].path(root, 1)
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        return [
            (str(file.relative_to(root)), 8 * file.stat().st_size)
            for file in files
            if file.name != ".metadata"
        ]

    def draw(self, cell: Cell, rng: random.Random, found: Any) -> dict[str, Any]:
        """Run a case that the generator draws."""
        if cell.situation == "flip":
            ((name, size),) = rng.choices(found, weights=[size for _, size in found])
            line = self.run_flip(cell, (name, rng.randrange(size)))
            return {**line, "kind": "flipped bit"}
        kinds = [
            (kind, fault, [key for key in found if names is None or key.name in names])
            for kind, (fault, names) in KINDS.items()
            if cell.situation != "load" or "ENOSPC" not in kind  # to read takes no space
        ]
        kind, fault, keys = rng.choice([one for one in kinds if one[2]])
        return {**self.run_case(cell, Planned(fault, rng.choice(keys))), "kind": kind}


def _work(bench: Bench, seed: int, mine: list[Cell], count: int, until: float, pipe: int) -> None:
    """Rounds of one fault for each cell, until time is up; a line of JSON for each."""
    found: dict[Cell, Any] = {
        cell: bench.bits(cell) if cell.situation == "flip" else bench.calls(cell) for cell in mine
    }
    for number in range(count):
        for cell in mine:
            if time.monotonic() > until:
                return
            rng = random.Random(f"{seed} {number} {cell}")
            for _ in range(_TRIES):
                line = bench.draw(cell, rng, found[cell])
                os.write(pipe, json.dumps({**line, "cell": cell, "round": number}).encode() + b"\n")
                if line["hit"]:
                    break


def _rounds(place: Path, seed: int, count: int, workers: int, until: float) -> list[dict[str, Any]]:
    """All lines, of several processes, which share the cells."""
    pipes: dict[int, tuple[int, bytes]] = {}
    for worker in range(workers):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                os.close(reader)
                bench = Bench(place / str(worker))
                try:
                    _work(bench, seed, cells()[worker::workers], count, until, writer)
                finally:
                    bench.close()
            except BaseException as error:
                print(f"a worker failed: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(0)
        os.close(writer)
        pipes[reader] = (pid, b"")
    lines: list[dict[str, Any]] = []
    told = time.monotonic()
    while pipes:
        for reader in select.select(list(pipes), [], [])[0]:
            pid, rest = pipes[reader]
            data = os.read(reader, 1 << 16)
            if not data:
                os.waitpid(pid, 0)
                os.close(reader)
                del pipes[reader]
                continue
            *complete, rest = (rest + data).split(b"\n")
            pipes[reader] = (pid, rest)
            lines += [json.loads(line) for line in complete]
        if time.monotonic() - told > 30:
            told = time.monotonic()
            print(f"{sum(line['hit'] for line in lines)} verified", flush=True)
    return lines


def summed(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts of all cells, over the rounds in which each cell had its fault."""
    hits = [line for line in lines if line["hit"]]
    counts = Counter(line["round"] for line in hits)
    whole = {number for number, count in counts.items() if count == len(cells())}
    hits = sorted((line for line in hits if line["round"] in whole), key=lambda line: line["round"])
    found = []
    for cell in cells():
        mine = [line for line in hits if Cell(*line["cell"]) == cell]
        outcomes = Counter(line["outcome"] for line in mine)
        examples: dict[str, list[dict[str, Any]]] = {}
        for line in mine:
            if line["outcome"] in BAD and len(examples.setdefault(line["outcome"], [])) < 2:
                kept = ("case", "said", "earlier", "newer")
                examples[line["outcome"]].append({key: line[key] for key in kept})
        found.append(
            {
                "system": cell.system,
                "situation": cell.situation,
                "ranks": cell.size,
                "verified": len(mine),
                "outcomes": {name: outcomes[name] for name in OUTCOMES if outcomes[name]},
                "kinds": dict(sorted(Counter(line["kind"] for line in mine).items())),
                "examples": examples,
            }
        )
    return {
        "rounds": len(whole),
        "run": len(lines),
        "verified": len(hits),
        "slowest_seconds": max((line["seconds"] for line in hits), default=0.0),
        "cells": found,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100, help="verified faults of each cell")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="the most to take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--case", action="append", help="run this case alone; may be repeated")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="where files are")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gc.freeze()  # children would copy what they collect
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if "torch_checkpointing" not in SYSTEMS:
        print("torch_checkpointing is not installed: it is left out")
    place = options.place / f"pyckpt-peers-{os.getpid()}"
    begun = time.monotonic()
    try:
        if options.case:
            return _alone(place, options.case)
        until = begun + 60 * options.minutes
        lines = _rounds(place, options.seed, options.cases, options.workers, until)
    finally:
        with suppress(OSError):
            os.rmdir(place)
    content = {
        "seed": options.seed,
        "seconds": round(time.monotonic() - begun),
        "bound_seconds": BOUND_S,
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "torch_checkpointing")
            if name == "torch" or name in SYSTEMS
        },
        **summed(lines),
    }
    print(results.write("peers", content, options.output))
    bad = 0
    for name, system in SYSTEMS.items():
        outcomes: Counter[str] = Counter()
        for cell in content["cells"]:
            if cell["system"] == name:
                outcomes.update(cell["outcomes"])
        print(f"{name}: {dict(outcomes)}")
        if system.version == "pyckpt":
            bad += sum(outcomes[outcome] for outcome in BAD)
    return 1 if bad or not content["verified"] else 0


def _alone(place: Path, texts: Sequence[str]) -> int:
    """Run cases, and tell all about each."""
    bench = Bench(place)
    bad = 0
    try:
        for text in texts:
            name, where, what = text.split("|")
            situation, _, size = where.partition("@")
            cell = Cell(name, situation, int(size))
            if situation == "flip":
                file, _, bit = what.rpartition(":")
                line = bench.run_flip(cell, (file, int(bit)))
            else:
                line = bench.run_case(cell, parse(what))
            print(json.dumps(line, indent=2))
            bad += not line["hit"] or line["outcome"] in BAD
    finally:
        bench.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
