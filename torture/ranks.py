"""``python -m torture.ranks --cases 100 --seed 1``: one of four ranks is struck, the others go on.

A rank is killed, stopped, slow, raises, or runs out of memory, threads, descriptors or disk, at a
phase of a save, a restore, a prune or a mirror's upload. Each other rank must then end within a
bound, with an error that names that rank, and no other, and says what happened; or, if it did no
harm, as if nothing had happened. The newest checkpoint that was committed must be whole, for pyckpt
and for PyTorch alone. The four ranks start again: they must restore it, bit for bit, save on, and
leave nothing behind. A strike that did not happen is not counted.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # which nobody shall import after the fork
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader

import pyckpt
from pyckpt.tools.verifying import verify
from torture import judge, kernel
from torture.rank_job import (
    PURPOSE,
    RANKS,
    TIMEOUT_S,
    Case,
    Job,
    digest_at,
    run_rank,
    tensors_at,
)
from torture.results import write

BOUND_S = TIMEOUT_S + 15 + 5 + 5 + 30
"""After a strike, each rank ends within this: the timeout, the time to find out who is missing, the
time to leave the others, that of a mirror, and slack for a busy machine."""
_LIFE_S = 240.0  # of a life that nothing happened to: only a hang takes so long
_DISK_BYTES = 192 << 20

_PHASES = (
    "before",
    "planning",
    "staging",
    "writing",
    "written",
    "committing",
    "renamed",
    "committed",
    "pruning",
    "mirroring",
    "metadata",
    "reading",
    "applying",
)
_KINDS = (
    *("kill", "kill", "stop", "slow", "raise"),
    *("memory", "threads", "descriptors", "file size", "disk"),
)
_OF_RANK_0 = ("committing", "renamed", "pruning")
_OF_THE_PROGRAM = ("before", "planning", "applying")
"""Phases in which code of the program runs, and may raise."""
_SAID = {
    "kill": "did not come",
    "stop": "did not come",
    "raise": PURPOSE,
    "memory": "memory|MemoryError|bad_alloc|allocate|start new thread|temporarily unavailable",
    "threads": "thread|temporarily unavailable",
    "descriptors": "Too many open files",
    "file size": "File too large",
    "disk": "No space left",
}


def cases(seed: int) -> Iterator[Case]:
    """Every phase with every kind, over and over, in random order."""
    random = Random(seed)
    numbers = count()
    while True:
        pairs = [
            (phase, kind)
            for phase in _PHASES
            for kind in _KINDS
            if kind != "raise" or phase in _OF_THE_PROGRAM
        ]
        random.shuffle(pairs)
        for phase, kind in pairs:
            who = 0 if phase in _OF_RANK_0 else random.randrange(RANKS)
            mirrored = phase == "mirroring" or random.random() < 0.2
            yield Case(next(numbers), phase, kind, who, mirrored)


# --- what the ranks wrote down --------------------------------------------------------------------


@dataclass
class Failure:
    kind: str
    ranks: list[int]
    known: bool
    text: str

    @property
    def named(self) -> set[int]:
        """The ranks that the error blames."""
        found = set(self.ranks)
        for some in re.findall(r"\branks? (\d+(?:(?:, | and |-)\d+)*)", self.text):
            found.update(int(number) for number in re.findall(r"\d+", some))
        return found


@dataclass
class Life:
    """What a rank wrote down between its start and its end."""

    struck: float | None = None
    restored: list[tuple[int, str]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    failure: Failure | None = None
    done: bool = False
    mirrored: bool | None = None
    gone: float | None = None
    harness: str = ""


def read(lines: list[str]) -> Life:
    life = Life()
    for line in lines:
        words, _, at = line.rpartition(" ")
        match words.split(" "):
            case ["struck"]:
                life.struck = float(at)
            case ["restored", step, digest]:
                life.restored.append((int(step) if step != "None" else 0, digest))
            case ["committed", step]:
                life.committed.append(int(step))
            case ["failed", kind, ranks, known, *text]:
                numbers = [] if ranks == "-" else [int(one) for one in ranks.split(",")]
                life.failure = Failure(kind, numbers, known == "known", " ".join(text))
            case ["mirrored", is_there]:
                life.mirrored = is_there == "True"
            case ["done"]:
                life.done = True
            case ["gone"]:
                life.gone = float(at)
            case ["harness", *text]:
                life.harness = " ".join(text)
    return life


def judge_first(case: Case, lives: list[Life]) -> list[str]:
    """What is wrong with the life in which a rank was struck."""
    wrong = [f"rank {r}: harness: {life.harness}" for r, life in enumerate(lives) if life.harness]
    struck = lives[case.who].struck
    assert struck is not None
    gone_away = case.kind in ("kill", "stop")
    someone_failed = any(life.failure for life in lives)
    for rank, life in enumerate(lives):
        if rank == case.who and gone_away:
            continue
        if life.gone is None:
            wrong.append(f"rank {rank}: did not end within {BOUND_S:g} s")
        elif life.gone - struck > BOUND_S:
            wrong.append(f"rank {rank}: ended after {life.gone - struck:.1f} s")
        wrong += [f"rank {rank}: {one}" for one in _wrong_restores(life, rank)]
        if life.failure is None:
            # The save or restore was over for this rank when another one failed.
            if someone_failed and not life.done and life.gone is not None:
                wrong.append(f"rank {rank}: ended without a word")
            continue
        wrong += [f"rank {rank}: {one}" for one in _wrong_failure(case, rank, life.failure)]
    if case.kind == "slow" and not all(life.done for life in lives):
        wrong.append("a rank that was slow made others fail")
    if gone_away and not someone_failed and case.phase not in ("committed", "pruning", "mirroring"):
        wrong.append("nobody noticed that the rank is gone")
    return wrong


def _wrong_restores(life: Life, rank: int) -> list[str]:
    return [
        f"restored step {step} with other bits"
        for step, digest in life.restored
        if step and digest != digest_at(step, rank)
    ]


def _wrong_failure(case: Case, rank: int, failure: Failure) -> list[str]:
    said = f"{failure.kind}: {failure.text[:600]}"
    wrong = []
    if not failure.known:
        wrong.append(f"an error that is none of pyckpt's: {said}")
    if case.kind == "raise" and rank == case.who:
        return wrong  # its own error
    if case.kind == "disk":
        if not failure.named:
            wrong.append(f"names no rank: {said}")
    elif failure.named != {case.who}:
        wrong.append(f"names {sorted(failure.named)}: {said}")
    # A program that left its loop by an error did not come, for the others.
    text = f"{failure.kind}: {failure.text}"
    if not re.search(f"{_SAID.get(case.kind, '')}|did not come", text):
        wrong.append(f"does not say what happened: {said}")
    return wrong


def judge_second(case: Case, lives: list[Life], newest: int) -> list[str]:
    """What is wrong with the life after it, which nobody disturbs."""
    wrong = []
    for rank, life in enumerate(lives):
        if life.harness or life.failure or not life.done or life.gone is None:
            what = life.harness or life.failure or "it did not end"
            wrong.append(f"again, rank {rank}: {what}")
            continue
        if [step for step, _ in life.restored] != [newest]:
            wrong.append(f"again, rank {rank}: restored {life.restored}, and not step {newest}")
        wrong += [f"again, rank {rank}: {one}" for one in _wrong_restores(life, rank)]
        if life.committed != [newest + 1, newest + 2]:
            wrong.append(f"again, rank {rank}: committed {life.committed} after {newest}")
        if case.mirrored and not life.mirrored:
            wrong.append(f"again, rank {rank}: the mirror does not have all")
    return wrong


# --- one case -------------------------------------------------------------------------------------


def run_case(case: Case, folder: Path, store: tuple[str, int]) -> dict[str, Any]:
    """Strike a rank, and judge what is left; for a process without threads."""
    with _file_system(folder, case.kind == "disk") as at:
        first = _live(Job(folder, at, store, f"{folder.name}/0", 0, case))
        if first[case.who].struck is None:
            problems = [life.harness or str(life.failure) for life in first if not life.done]
            return {"hit": False, "wrong": problems}
        wrong = judge_first(case, first)
        committed = max((step for life in first for step in life.committed), default=0)
        found = _in_child(lambda: newest_of(at / "run"))
        newest = found["newest"]
        wrong += found["wrong"]
        if newest < committed:
            wrong.append(f"the newest is step {newest}, and {committed} was committed")
        second = _live(Job(folder, at, store, f"{folder.name}/1", 1, case))
        wrong += judge_second(case, second, newest)
        after = _in_child(lambda: newest_of(at / "run"))
        wrong += [f"again: {one}" for one in after["wrong"]]
        wrong += [f"left behind: {one}" for one in judge.strays(at / "run", run=True)]
        if case.mirrored:
            mirror = _in_child(lambda: newest_of(at / "mirror"))
            wrong += [f"mirror: {one}" for one in mirror["wrong"]]
            if mirror["newest"] != after["newest"]:
                wrong.append(f"mirror: the newest is step {mirror['newest']}")
        if wrong and at != folder:
            shutil.copytree(at, folder / "disk", ignore=shutil.ignore_patterns("*.distcp"))
    failed = any(life.failure for life in first)
    struck = first[case.who].struck
    ends = [life.gone - struck for life in first if life.gone is not None and struck is not None]
    errors = {life.failure.kind for life in first if life.failure is not None}
    return {
        "hit": True,
        "failed": failed,
        "seconds": max(ends, default=None),
        "errors": sorted(errors),
        "wrong": wrong,
    }


@contextmanager
def _file_system(folder: Path, mounts: bool) -> Iterator[Path]:
    """Where the case's ranks live: a file system of its own that may be filled, if it needs one."""
    if not mounts:
        yield folder
        return
    at = folder / "mounted"
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(at)]
    subprocess.run(command, check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def _live(job: Job) -> list[Life]:
    """Start the ranks, and wait until they have ended; a stopped one is killed when it is alone."""
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            kernel.die_with_parent()
            run_rank(job, rank)
        pids.append(pid)
    pidfds = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    stopped = job.case.who if job.life == 0 and job.case.kind == "stop" else None
    ends = time.monotonic() + _LIFE_S
    struck: float | None = None
    while pidfds:
        if struck is None and job.life == 0:
            struck = _life(job, job.case.who).struck
            if struck is not None:
                ends = struck + BOUND_S
        if time.monotonic() > ends or (struck and list(pidfds.values()) == [stopped]):
            for pidfd in pidfds:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ready, _, _ = select.select([*pidfds], [], [], 0.2)
        for pidfd in ready:
            os.waitpid(pids[pidfds.pop(pidfd)], 0)
            os.close(pidfd)
    return [_life(job, rank) for rank in range(RANKS)]


def _life(job: Job, rank: int) -> Life:
    try:
        text = (job.folder / f"diary-{job.life}-{rank}").read_text()
    except FileNotFoundError:
        return Life()
    return read(text.split("\n")[:-1])


def newest_of(run: Path) -> dict[str, Any]:
    """The newest checkpoint in a directory, and what is wrong with it. It is read in full, by
    pyckpt and by PyTorch alone."""
    warnings.simplefilter("ignore")
    committed = sorted(run.glob("step-????????/.metadata"))
    if not committed:
        return {"newest": 0, "wrong": [f"{run.name}: no checkpoint"]}
    path = committed[-1].parent
    step = int(path.name.removeprefix("step-"))
    verified = [(one.parent.name, verify(one.parent)) for one in committed]
    wrong = [f"{name}: damaged: {one.damages[:3]}" for name, one in verified if not one.good]
    expected = tensors_at(step)
    ours = pyckpt.load(path)
    mine = {
        "sharded": ours["sharded"],
        "model.weight": ours["model"]["weight"],
        "model.bias": ours["model"]["bias"],
    }
    stock: dict[str, Any] = {key: torch.zeros_like(value) for key, value in expected.items()}
    stock["app.step"] = 0
    state_dict_loader.load(stock, storage_reader=FileSystemReader(path), no_dist=True)
    for reader, found, number in (
        ("pyckpt", mine, ours["app"]["step"]),
        ("PyTorch", stock, stock["app.step"]),
    ):
        if number != step:
            wrong.append(f"{path.name}: {reader} reads the object of step {number}")
        wrong += [
            f"{path.name}: {reader} reads other bits of {key}"
            for key, value in expected.items()
            if not torch.equal(found[key], value)
        ]
    return {"newest": step, "wrong": wrong}


def _in_child(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns in a process of its own, since its threads would not survive a fork
    here."""
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            kernel.die_with_parent()
            theirs.send(do())
        except BaseException:
            theirs.send({"newest": 0, "hit": True, "wrong": [traceback.format_exc()]})
        finally:
            os._exit(0)
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        found = {"newest": 0, "hit": True, "wrong": ["the process that looks died"]}
    os.waitpid(pid, 0)
    return found


# --- all of them ----------------------------------------------------------------------------------


def _start_store() -> tuple[int, tuple[str, int]]:
    """A process with the ranks' store, as torchrun's agent keeps one; its id, and the address."""
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        theirs.send(store.port)
        while True:
            signal.pause()
    return pid, ("127.0.0.1", ours.recv())


class Tally:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.by_kind: dict[str, Counter[str]] = {}
        self.by_phase: dict[str, Counter[str]] = {}
        self.errors: Counter[str] = Counter()
        self.longest: dict[str, float] = {}
        self.wrong: list[str] = []

    def add(self, case: Case, found: Mapping[str, Any]) -> None:
        if not found["hit"]:
            self.counts["without a strike"] += 1
            self.wrong += [f"{case}: no strike: {one}" for one in found["wrong"]]
            return
        outcome = "with an error" if found.get("failed") else "without effect"
        self.counts["verified"] += 1
        self.counts[outcome] += 1
        self.by_kind.setdefault(case.kind, Counter())[outcome] += 1
        self.by_phase.setdefault(case.phase, Counter())[outcome] += 1
        self.errors.update(found.get("errors", ()))
        if found.get("seconds") is not None:
            longest = max(self.longest.get(case.kind, 0.0), found["seconds"])
            self.longest[case.kind] = round(longest, 1)
        self.wrong += [f"{case}: {one}" for one in found["wrong"]]

    @property
    def result(self) -> dict[str, Any]:
        return {
            "counts": dict(sorted(self.counts.items())),
            "by_kind": {key: dict(value) for key, value in sorted(self.by_kind.items())},
            "by_phase": {key: dict(value) for key, value in sorted(self.by_phase.items())},
            "errors": dict(sorted(self.errors.items())),
            "longest_seconds_from_strike_to_end": dict(sorted(self.longest.items())),
            "wrong": self.wrong,
        }


def torment(chosen: Iterator[Case], ends: float, at_once: int, folder: Path) -> Tally:
    """Run cases, several at once, until there are no more or the time is over."""
    tally = Tally()
    pid, store = _start_store()
    running: dict[int, tuple[Case, int, Any, Path]] = {}  # by the pipe of each
    try:
        exhausted = False
        while running or not exhausted:
            while not exhausted and len(running) < at_once:
                case = next(chosen, None)
                if case is None or time.monotonic() > ends:
                    exhausted = True
                    break
                place = folder / f"case-{case.number}"
                place.mkdir()
                ours, theirs = Pipe(duplex=False)
                child = os.fork()
                if child == 0:
                    kernel.die_with_parent()
                    try:
                        theirs.send(run_case(case, place, store))
                    except BaseException:
                        theirs.send({"hit": False, "wrong": [traceback.format_exc()]})
                    finally:
                        os._exit(0)
                theirs.close()
                running[ours.fileno()] = case, child, ours, place
            for descriptor in select.select([*running], [], [])[0] if running else []:
                case, child, ours, place = running.pop(descriptor)
                found = ours.recv()
                ours.close()
                os.waitpid(child, 0)
                tally.add(case, found)
                for one in found["wrong"]:
                    print(f"{case}: {one}", flush=True)
                if not found["wrong"]:
                    shutil.rmtree(place)
                if tally.counts["verified"] % 20 == 0:
                    print(f"{tally.counts['verified']} verified", flush=True)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torture.ranks", description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, help="cases that run at the same time")
    parser.add_argument("--phase", choices=_PHASES)
    parser.add_argument("--kind", choices=sorted(set(_KINDS)))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    chosen = (
        case
        for case in cases(arguments.seed)
        if arguments.phase in (None, case.phase) and arguments.kind in (None, case.kind)
    )
    limited = (case for case, _ in zip(chosen, range(arguments.cases), strict=False))
    folder = Path(tempfile.mkdtemp(prefix="pyckpt-ranks-"))
    tally = torment(limited, begun + 60 * arguments.minutes, arguments.at_once, folder)
    path = write(
        "ranks",
        {
            "seed": arguments.seed,
            "seconds": round(time.monotonic() - begun, 1),
            "ranks": RANKS,
            "timeout_seconds": TIMEOUT_S,
            "bound_seconds": BOUND_S,
            **tally.result,
        },
        arguments.output,
    )
    print(f"{dict(tally.counts)}, {len(tally.wrong)} wrong: {path}")
    if tally.wrong:
        print(f"what is left lies in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
