"""``python -m torture.concurrency --minutes 10 --seed 1``: everything at once, in real processes.

A child (`torture.concurrent_job`) trains, saves in the background, restores, loads, exports,
prunes, records, asks for progress and statistics, collects garbage, forks, and starts and ends
threads, all at once. Beside it, threads save into stores that fail, give saves up, and load
(`torture.stores`); a mirror gets the checkpoints. It ends in one of many ways, or a signal ends it,
at an instant that nobody chose. Then it must have ended within a bound, without a crash; what it
was told is committed must be there, each checkpoint must have its right bytes, and the next child
goes on from the newest.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pyckpt
from pyckpt.tools.verifying import verify
from pyckpt.train.store.catalog import Catalog
from torture.concurrent_job import BOUND_SECONDS
from torture.results import ROOT, write
from torture.stepped import step_of
from torture.stores import ADDRESSES, BUCKET, Server, judge_address, missing

_RUNS_IN_A_ROOT = 6
_SAVES_OF_ONE = 100_000
"""More than a child makes in stores: their numbers tell which child made them."""
_ENDINGS = (
    "return",
    "exit",
    "_exit",
    "raise",
    "no close",
    "SIGTERM",
    "SIGINT",
    "SIGUSR1",
    "SIGKILL",
)
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


@dataclass(frozen=True)
class Place:
    """Where the children of one root save."""

    folder: Path
    mirror: str | None
    addresses: Sequence[str]

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def told(self) -> Path:
        return self.folder / "told"

    def lines(self) -> list[str]:
        return self.told.read_text().split("\n") if self.told.exists() else []


def _one(place: Place, random: Random, ending: str, number: int) -> list[str]:
    """Runs a child to its end, and returns what is wrong.

    Args:
        number: of the child in its root.
    """
    log = place.folder / "log"
    before = len(place.lines())
    with log.open("w") as file:
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "torture.concurrent_job", str(place.root), ending),
                *("--seed", str(random.randrange(1 << 30))),
                *(("--mirror", place.mirror) if place.mirror else ()),
                *("--first", str(1 + number * _SAVES_OF_ONE)),
                *("--addresses", *place.addresses),
            ],
            stdout=file,
            stderr=file,
            cwd=ROOT,
        )
        by_signal = ending.startswith("SIG")
        try:
            if by_signal:
                _wait_for_begin(child, place, before)
                time.sleep(random.random() * 3)
                child.send_signal(getattr(signal, ending))
            status = _wait(child, place.told)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGABRT)  # faulthandler says where it hangs
            child.wait()
            return [f"hung for {BOUND_SECONDS} s ({ending}): {log.read_text()[-6000:]}"]
    wrong = []
    said = log.read_text()
    planned = {"return": {0}, "no close": {0}, "exit": {3}, "_exit": {3}, "raise": {1}}
    # A signal may come when the child has ended by itself.
    allowed = planned.get(ending, {0, 1, 130, 143, -int(getattr(signal, ending, 0))})
    if -status in _CRASHES or status not in allowed:
        wrong.append(f"status {status} after {ending}: {said[-3000:]}")
    told = place.lines()
    wrong += [line for line in told[before:] if line.startswith("wrong")]
    return wrong + _checked(place.root, told[before:])


def _wait_for_begin(child: subprocess.Popen[bytes], place: Place, before: int) -> None:
    end = time.monotonic() + BOUND_SECONDS
    while child.poll() is None and time.monotonic() < end:
        if any(line.startswith("begin ") for line in place.lines()[before:]):
            return
        time.sleep(0.02)


def _wait(child: subprocess.Popen[bytes], told: Path) -> int:
    """The child's status. Raises TimeoutExpired if it has said nothing for too long."""
    said = 0
    end = time.monotonic() + BOUND_SECONDS
    while True:
        try:
            return child.wait(1)
        except subprocess.TimeoutExpired:
            size = told.stat().st_size if told.exists() else 0
            if size != said:
                said, end = size, time.monotonic() + BOUND_SECONDS
            elif time.monotonic() > end:
                raise


def _checked(root: Path, told: Sequence[str]) -> list[str]:
    committed = [int(line.split()[1]) for line in told if line.startswith("committed")]
    wrong = []
    found = []
    for entry in Catalog(root).entries():
        if entry.step is None or entry.state in ("unfinished", "removed"):
            continue
        if entry.checkpoint is None:
            wrong.append(f"committed, and not valid: {entry}")
            continue
        found.append(entry.step)
        if not verify(entry.path).good:
            wrong.append(f"{entry.path.name} is damaged")
        try:
            assert step_of(pyckpt.load(str(entry.path))) == entry.step
        except (AssertionError, pyckpt.errors.PyckptError, OSError) as error:
            wrong.append(f"{entry.path.name}: {error}")
    if committed and max(found, default=-1) < max(committed):
        wrong.append(
            f"step {max(committed)} was committed, and the newest is {max(found, default=None)}"
        )
    return wrong


def _checked_mirror(mirror: str) -> list[str]:
    """Each checkpoint in it must be whole."""
    if mirror.startswith("s3://"):
        from pyckpt.remote.objects import Objects

        found = [name for name in Objects(mirror).list() if name.endswith("/.metadata")]
        paths = [f"{mirror}/{name.removesuffix('/.metadata')}" for name in found]
    else:
        paths = [str(path.parent) for path in Path(mirror).glob("step-*/.metadata")]
    wrong = []
    for path in paths:
        try:
            step = step_of(pyckpt.load(path))
            assert path.endswith(f"step-{step:08d}"), f"it holds step {step}"
        except (AssertionError, OSError, pyckpt.errors.PyckptError) as error:
            wrong.append(f"{path}: {type(error).__name__}: {error}")
    return wrong


@contextmanager
def _place(random: Random, server: Server | None) -> Iterator[Place]:
    """An empty root, with its mirror, if it has one, and stores."""
    folder = Path(tempfile.mkdtemp(prefix="pyckpt-concurrency-"))
    try:
        mirrors = [None, str(folder / "mirror")]
        if server is None:
            yield Place(folder, random.choice(mirrors), ())
            return
        with server.running():
            mirror = random.choice([*mirrors, f"s3://{BUCKET}/mirror"])
            yield Place(folder, mirror, ADDRESSES)
    finally:
        shutil.rmtree(folder)


def _run(arguments: argparse.Namespace) -> int:
    random = Random(arguments.seed)
    end = time.monotonic() + 60 * arguments.minutes
    endings: Counter[str] = Counter()
    words: Counter[str] = Counter()
    mirrors: Counter[str] = Counter()
    wrong: list[str] = []
    coming: list[str] = []
    lacks = missing()
    if lacks:
        print(f"without a store that fails, since there is no {lacks}")
    server = None if lacks else Server(Random(arguments.seed))

    def is_over() -> bool:
        return time.monotonic() > end or (0 < arguments.cases <= endings.total())

    while not is_over():
        with _place(random, server) as place:
            mirrors["none" if place.mirror is None else place.mirror.split("/")[0] or "/"] += 1
            found: list[str] = []
            for number in range(_RUNS_IN_A_ROOT):
                if not coming:  # each of them equally often
                    coming = random.sample(_ENDINGS, len(_ENDINGS))
                ending = coming.pop()
                found += _one(place, random, ending, number)
                endings[ending] += 1
                if server is not None:
                    server.calm = True
                for url in (*place.addresses, f"file://{place.folder}/plain-file"):
                    found += judge_address(url, place.lines())
                if place.mirror is not None:
                    found += _checked_mirror(place.mirror)
                if server is not None:
                    server.calm = False
                if found or is_over():
                    break
            for line in place.lines():
                words[" ".join(line.split()[:1])] += 1
            for one in found:
                print(one, flush=True)
            wrong += found
    print(f"{endings.total()} processes, {len(wrong)} wrong")
    write(
        "concurrency",
        {
            "seed": arguments.seed,
            "processes": endings.total(),
            "endings": dict(sorted(endings.items())),
            "told_committed": words["committed"],
            "mirrors": dict(sorted(mirrors.items())),
            "saves_in_stores": {
                what: words[f"store-{what}"] for what in ("begin", "saved", "failed")
            },
            "troubles_of_the_store": {}
            if server is None
            else dict(sorted(server.troubles.items())),
            "left_out": lacks,
            "wrong": wrong,
        },
        arguments.output,
    )
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torture.concurrency", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--cases", type=int, default=0, help="processes at most; 0: no limit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return _run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
