"""Every system call of what pyckpt does, killed at it, failed at it, delayed; alone and in pairs.

::

    python -m torture.faults [--cases N] [--pairs N] [--seed N] [--workers N] [--output FILE]
    python -m torture.faults --sweep ...
    python -m torture.faults --case 'dcp-save@2/1:fsync:checkpoint/__1_ID.distcp:1=error=EIO'

A case runs one scenario (`torture.scenarios`) with one fault, or two. It counts only if all of its
faults happened. Afterwards the directory must hold the old checkpoint or the new one, whole, as
pyckpt reads it and as PyTorch alone does; what the ranks were told must be true and the same; what
comes next must succeed; and nothing may be left over. Exits 1 if there is anything to object to.
The result adds up: a run adds itself to those that are in the file.

The name of the call is drawn first, evenly; then the scenario, the kind of fault, and the place.
Else most cases would be about the few calls of which there are many. With ``--sweep``, single
faults go through every fault at every call instead, each once before any comes again.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torture import results
from torture.adding_up import added, code, next_seed, runs_in, summed
from torture.cases import BOUND_S, Case, Desk, Verdict, case_of
from torture.scenarios import SCENARIOS
from torture.supervisor import STARVED_MAX_S, TRANSFERS, Fault, Key, Planned

__all__ = ["faults_of", "main"]

_ERRORS = ("EIO", "ENOSPC", "EINTR", "EDQUOT", "EAGAIN", "EMFILE", "ENOMEM")
_OF_CLOSE = ("EIO", "ENOSPC", "EINTR", "EDQUOT")
_OF_MEMORY = ("EAGAIN", "ENOMEM")
_OF_LINKS = (*_ERRORS, "EMLINK", "EXDEV")  # upon the last two a file is copied instead
_KINDS = {"kill": 2, "error": 4, "stays": 3, "short": 3, "delay": 1}
"""How often each kind of fault is drawn, if it may happen to the call."""
_LATER_MAX = 12  # how many calls after the first fault the second one comes, at most
_SHARE_OF_FOUR = 0.15
_CODE = ("pyckpt", "csrc", "torture")  # what is tried, and what tries it
_HARNESS = 2
"""Goes up by one when the judge begins to look at more, or cases to reach more. So a sum over runs
can tell how many of its cases were looked at as closely as they would be today. Runs without it
are of the first: one write a data file, and neither keys nor places of elements compared."""
_SILENT_S = 6 * (BOUND_S + STARVED_MAX_S)  # no case takes longer; a worker so silent hangs

_TRIES = 20  # how often a case that has come before is drawn again

Profile = Mapping[tuple[str, int], Sequence[Key]]


def faults_of(name: str) -> list[Fault]:
    """What may happen to a call of this name."""
    errors: Sequence[str] = _ERRORS
    if name == "close":
        errors = _OF_CLOSE
    elif name in ("clone", "clone3", "mmap"):
        errors = _OF_MEMORY
    elif name in ("link", "linkat"):
        errors = _OF_LINKS
    faults = [Fault("kill"), *(Fault("error", getattr(errno, error)) for error in errors)]
    if name not in ("close", "clone", "clone3", "mmap"):
        faults += [Fault("stays", getattr(errno, error)) for error in errors if error != "EINTR"]
    if name in TRANSFERS:
        faults += [Fault("short", 0), Fault("short", 0.5)]
    return [*faults, Fault("delay", 0.25)]


def sweep(profile: Profile, rng: random.Random) -> Iterator[Case]:
    """Every fault at every call, in random order; then again, with longer delays."""
    everything = [
        (name, size, key, fault)
        for (name, size), keys in profile.items()
        for key in keys
        for fault in faults_of(key.name)
        # Most calls are those of four ranks, which do what two do, for twice the time.
        if size < 4 or rng.random() < _SHARE_OF_FOUR
    ]
    while True:
        rng.shuffle(everything)
        for name, size, key, fault in everything:
            yield Case(name, size, [Planned(_drawn(fault, rng), key)])


def _drawn(fault: Fault, rng: random.Random) -> Fault:
    """The same; of delays, some are longer."""
    if fault.kind == "delay" and rng.random() < 0.2:
        return Fault("delay", round(rng.uniform(0.05, 3), 2))
    return fault


class _Draw:
    """Draws the name of a call evenly, then where: first the scenario, then the call."""

    def __init__(self, profile: Profile, rng: random.Random) -> None:
        self._rng = rng
        self._at: dict[str, dict[tuple[str, int], list[int]]] = {}
        for where, keys in profile.items():
            for n, key in enumerate(keys):
                self._at.setdefault(key.name, {}).setdefault(where, []).append(n)
        self._left: list[str] = []

    def name(self) -> str:
        """The name of a call."""
        if not self._left:  # all names have had their turn
            self._left = sorted(self._at)
            self._rng.shuffle(self._left)
        return self._left.pop()

    def place(self, name: str) -> tuple[str, int, int]:
        """A scenario, a number of ranks, and the position of a call of this name among theirs."""
        found = self._at[name]
        # Four ranks do what two do, for twice the time.
        (where,) = self._rng.choices(list(found), [2 if size < 4 else 1 for _, size in found])
        return (*where, self._rng.choice(found[where]))

    def kind(self, name: str) -> str:
        """A kind of fault that may happen to a call of this name."""
        possible = {fault.kind for fault in faults_of(name)}
        kinds = [kind for kind in _KINDS if kind in possible]
        return self._rng.choices(kinds, [_KINDS[kind] for kind in kinds])[0]

    def fault(self, name: str, kind: str) -> Fault:
        """A fault of this kind."""
        faults = [fault for fault in faults_of(name) if fault.kind == kind]
        return _drawn(self._rng.choice(faults), self._rng)


def singles(profile: Profile, rng: random.Random) -> Iterator[Case]:
    """Faults. Of a rare call there are few cases, which come again: its threads may meet in another
    order then."""
    draw = _Draw(profile, rng)
    seen: set[str] = set()
    while True:
        call = draw.name()
        kind = draw.kind(call)
        for _ in range(_TRIES):
            name, size, at = draw.place(call)
            case = Case(name, size, [Planned(draw.fault(call, kind), profile[name, size][at])])
            if str(case) not in seen:
                break
        seen.add(str(case))
        yield case


def pairs(profile: Profile, rng: random.Random) -> Iterator[Case]:
    """A fault anywhere, and a second one at a call soon after it, or anywhere, on any rank."""
    draw = _Draw(profile, rng)
    while True:
        name, size, at = draw.place(draw.name())
        keys = profile[name, size]
        fault = draw.fault(keys[at].name, draw.kind(keys[at].name))
        first = Planned(fault, keys[at])
        rank = rng.randrange(size)
        if fault.kind == "kill" and rank == keys[at].rank:
            if size == 1:
                continue  # there is nobody left to whom a second could happen
            rank = (rank + 1) % size
        if rng.random() < 0.6 or at + 1 == len(keys):
            # Whatever comes next, so mostly the same kinds of calls for all.
            later = 1 + int(rng.random() ** 2 * _LATER_MAX)
            kind = rng.choice(["kill", "error", "error", "error", "stays", "delay"])
            # Whoever is always interrupted tries for ever, as Python does.
            errors = [one for one in _ERRORS if (kind, one) != ("stays", "EINTR")]
            value = float(getattr(errno, rng.choice(errors)))
            second = Fault(kind, {"kill": 0.0, "delay": 0.25}.get(kind, value))
            yield Case(name, size, [first, Planned(second, after=(rank, later))])
        else:
            left = [key for key in keys[at + 1 :] if key.rank == rank]
            if left:
                call = rng.choice(sorted({key.name for key in left}))
                key = rng.choice([key for key in left if key.name == call])
                yield Case(
                    name, size, [first, Planned(draw.fault(key.name, draw.kind(key.name)), key)]
                )


def profile_of(desk: Desk, names: Sequence[str], sizes: Sequence[int]) -> Profile:
    """The calls of undisturbed runs, of those scenarios for which this process may do all."""
    return {
        (name, size): desk.calls(SCENARIOS[name], size)
        for name in names
        if os.geteuid() == 0 or not SCENARIOS[name].nodes
        for size in SCENARIOS[name].sizes
        if size in sizes
    }


def _work(place: Path, cases: Iterator[Case], target: int, until: float, pipe: int) -> None:
    """Run cases until so many have happened, or time is up; write a line of JSON for each."""
    desk = Desk(place)
    verified = 0
    try:
        for case in cases:
            if verified >= target or time.monotonic() > until:
                break
            try:
                verdict = desk.run(case)
            except Exception as error:
                verdict = Verdict(True, [f"the harness failed: {error!r}"])
            verified += verdict.hit
            line = {
                "case": str(case),
                "hit": verdict.hit,
                "outcome": verdict.outcome,
                "seconds": round(verdict.seconds, 3),
                "objections": verdict.objections,
            }
            if verdict.objections:
                line["hits"], line["said"] = verdict.hits, repr(verdict.said)
            os.write(pipe, json.dumps(line).encode() + b"\n")
    finally:
        desk.close()


class Tally:
    """What became of all cases of a kind."""

    def __init__(self) -> None:
        self.run = self.verified = 0
        self.outcomes: Counter[str] = Counter()
        self.scenarios: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.deviations: list[dict[str, Any]] = []
        self.slowest = 0.0

    def add(self, line: dict[str, Any]) -> None:
        self.run += 1
        if not line["hit"]:
            return
        self.verified += 1
        case = case_of(line["case"])
        self.outcomes[line["outcome"]] += 1
        self.scenarios[f"{case.scenario}@{case.size}"] += 1
        for planned in case.plan:
            self.faults[str(planned.fault) if planned.fault.kind != "delay" else "delay"] += 1
            if planned.key is not None:
                self.calls[planned.key.name] += 1
        self.slowest = max(self.slowest, line["seconds"])
        if line["objections"]:
            self.deviations.append(line)

    def content(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "verified": self.verified,
            "deviations": len(self.deviations),
            "outcomes": dict(self.outcomes.most_common()),
            "scenarios": dict(sorted(self.scenarios.items())),
            "calls": dict(self.calls.most_common()),
            "faults": dict(self.faults.most_common()),
        }


def _share(
    profile: Profile, make: Any, seed: int, count: int, workers: int, until: float, place: Path
) -> Tally:
    """Run cases in several processes, each its share of one sequence that the seed decides."""
    tally = Tally()
    pipes: dict[int, tuple[int, bytes]] = {}
    for worker in range(workers):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.close(reader)
                everything = make(profile, random.Random(seed))
                mine = (case for n, case in enumerate(everything) if n % workers == worker)
                target = count // workers + (worker < count % workers)
                _work(place / str(worker), mine, target, until, writer)
            except BaseException as error:
                print(f"a worker failed: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(0)
        os.close(writer)
        pipes[reader] = (pid, b"")
    told = time.monotonic()
    heard = dict.fromkeys(pipes, told)
    while pipes:
        ready = select.select(list(pipes), [], [], BOUND_S)[0]
        for reader, (pid, _) in pipes.items():
            if reader not in ready and time.monotonic() - heard[reader] > _SILENT_S:
                os.kill(pid, signal.SIGKILL)  # its ranks go with it
                tally.deviations.append({"case": "?", "objections": ["a worker hung"]})
                heard[reader] = time.monotonic()
        for reader in ready:
            pid, rest = pipes[reader]
            heard[reader] = time.monotonic()
            data = os.read(reader, 1 << 16)
            if not data:
                os.waitpid(pid, 0)
                os.close(reader)
                del pipes[reader]
                continue
            *lines, rest = (rest + data).split(b"\n")
            pipes[reader] = (pid, rest)
            for line in lines:
                found = json.loads(line)
                tally.add(found)
                if found["hit"] and found["objections"]:
                    print(f"{found['case']}\n    {found['objections']}", flush=True)
        if time.monotonic() - told > 15:
            told = time.monotonic()
            print(
                f"{make.__name__}: {tally.verified} of {count} verified, {tally.run} run, "
                f"{len(tally.deviations)} deviations",
                flush=True,
            )
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="verified single faults")
    parser.add_argument("--pairs", type=int, help="verified pairs; by default as many")
    parser.add_argument(
        "--minutes",
        type=float,
        default=24 * 60.0,
        help="the most to take, in all, once the calls are known",
    )
    parser.add_argument(
        "--sweep", action="store_true", help="single faults go through every fault at every call"
    )
    parser.add_argument("--seed", type=int, help="by default one that no run in the file had")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--case", action="append", help="run this case alone; may be repeated")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="where files are")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    earlier = runs_in(options.output or results.RESULTS / "faults.json")
    if options.seed is None:
        options.seed = next_seed(earlier)
    torch.set_num_threads(1)
    gc.freeze()  # children would copy what they collect
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = options.place / f"pyckpt-torture-{os.getpid()}"
    try:
        if options.case:
            return _alone(place, [case_of(text) for text in options.case])
        desk = Desk(place / "profile")
        try:
            profile = profile_of(desk, options.scenarios, options.sizes)
        finally:
            desk.close()
        begun = time.monotonic()
        until = begun + 60 * options.minutes
        count_of_pairs = options.cases if options.pairs is None else options.pairs
        both = {}
        for kind, make, count, seed, share in (
            ("singles", sweep if options.sweep else singles, options.cases, options.seed, 0.5),
            ("pairs", pairs, count_of_pairs, options.seed + 1, 1.0),
        ):
            end = begun + share * (until - begun)
            both[kind] = _share(profile, make, seed, count, options.workers, end, place)
    finally:
        with suppress(OSError):
            os.rmdir(place)
    deviations = [line for tally in both.values() for line in tally.deviations]
    run = {
        **{key: results.head()[key] for key in ("date", "commit", "changed")},
        "code": code(*_CODE),
        "harness": _HARNESS,
        "seed": options.seed,
        "sweep": options.sweep,
        "seconds": round(time.monotonic() - begun),
        "slowest_seconds": max(tally.slowest for tally in both.values()),
        "cpu_seconds": round(sum(os.times()[:4])),
        "profiled_calls": sum(map(len, profile.values())),
        **{name: tally.content() for name, tally in both.items()},
        "deviations": deviations,
    }
    runs = added(earlier, run)
    content = {
        "bound_seconds": BOUND_S,
        **{name: summed([one[name] for one in runs]) for name in both},
        "by_this_code": {
            name: sum(
                one[name]["verified"]
                for one in runs
                if one["code"] == run["code"] and not one["changed"]
            )
            for name in both
        },
        "by_this_harness": {
            name: sum(one[name]["verified"] for one in runs if one.get("harness") == _HARNESS)
            for name in both
        },
        "runs": runs,
    }
    path = results.write("faults", content, options.output)
    for name, tally in both.items():
        print(
            f"{name}: {tally.verified} verified of {tally.run} run, "
            f"{len(tally.deviations)} deviations; {tally.faults['delay']} delays among the faults"
        )
    print(path)
    counts = {"singles": options.cases, "pairs": count_of_pairs}
    late = time.monotonic() >= begun + 30 * options.minutes  # the singles have half of the time
    for name, tally in both.items():
        if tally.verified < (min(1, counts[name]) if late else counts[name]):
            print(f"{name}: only {tally.verified} verified", file=sys.stderr)
            return 1
    return 1 if deviations else 0


def _alone(place: Path, cases: Sequence[Case]) -> int:
    """Run cases, and tell all about each."""
    desk = Desk(place)
    found = 0
    try:
        for case in cases:
            verdict = desk.run(case)
            print(case)
            print("  happened:", *verdict.hits, sep="\n    ")
            for rank, said in enumerate(verdict.said):
                print(f"  rank {rank} was told: {said}")
            print(*(f"  OBJECTION: {one}" for one in verdict.objections or ["none"]), sep="\n")
            found += bool(verdict.objections) or not verdict.hit
    finally:
        desk.close()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
