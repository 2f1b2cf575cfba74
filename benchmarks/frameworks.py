"""Frameworks' own checkpoints beside pyckpt's: training time lost, and time to resume, on CPUs.

    python benchmarks/frameworks.py [--dir DIR] [--rounds 3] [--size-mib 1152] [--only SECTION]

Each framework trains a model of square layers with AdamW on two ranks (gloo, a thread each), once
with its own checkpoints and once with pyckpt's; the two take turns, in an order that is rotated
from round to round. ``--size-mib`` is the size of parameters and optimizer state: 1152 are 100
million parameters. Each job has processes of its own, which have imported everything.

Lost by a save  The time of the 3 steps after a save, from the end of the step before it on, so that
                the call counts, less 3 times the median of the quiet steps beside it: those that
                come after the 3 steps of a save, before the next one. The first save of a job, and
                the later two. It is noted if a save lasted longer than its 3 steps. "Blocked" is
                from the end of the step before a save to the beginning of the next.
Before          The time of the steps before the first save, but for two, beyond that of quiet ones:
                what it takes to make the memory ahead would be in it, and all else that is slow at
                the beginning of a job, so the other way's is what to compare it with.
Noise           What the time of 3 steps varies by without a save: the standard deviation of quiet
                steps about the median beside them, times the root of 3.
Resume          From the call that resumes to the first step, less the same of a job that begins
                anew with the framework's own checkpoints (median of the run). "Cached": right after
                the job that saved; "cold": with the checkpoint's files out of the page cache, as on
                another node. What pyckpt wrote is in no page cache in either case.
Lines           What a user adds to a program or changes in it.

A time lost that is smaller than the noise of its median counts as that noise, so a ratio is an
upper bound. If the framework's own is not above the noise, the target is not judged; nor is one of
resuming where a difference is not above zero. A section that has lasted for
2 minutes begins no other round.

The losses of the resumed steps, and the bits of all parameters after them, must be those of the job
that saved. Each job keeps two checkpoints. CPU seconds are those of both ranks.

Results go to benchmarks/results/frameworks.json. The exit code is 1 if bytes were wrong, else 0.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from _common import Options, Report, Sample, WrongBytes, in_children, preload, remove, run
from _framework_jobs import FRAMEWORKS
from _frameworks import (
    LAST,
    OURS,
    PERIOD,
    SAVES,
    STOCK,
    TOUCHED,
    WARM,
    Job,
    Way,
    on_rank,
)

RANKS = 2
SECTION_SECONDS = 120.0
"""After which no other round begins: five sections are to end within 20 minutes."""
KINDS = ("cached", "cold")
WAYS: tuple[Way, Way] = (STOCK, OURS)


def measure(name: str, report: Report, options: Options) -> None:
    framework = FRAMEWORKS[name]
    package = framework.modules[0].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        report.note(f"{name}: {package} is not installed")
        return
    report.console.print(f"[bold]{name}[/]")
    saves: dict[str, list[Sample]] = {way: [] for way in WAYS}
    resumes: dict[str, dict[str, list[Sample]]] = {
        kind: {way: [] for way in WAYS} for kind in KINDS
    }
    ran_over = dict.fromkeys(WAYS, 0)
    fresh: list[Sample] = []
    begun = time.monotonic()
    rounds = 0
    while rounds < options.rounds and time.monotonic() - begun < SECTION_SECONDS:
        for way in WAYS if rounds % 2 == 0 else reversed(WAYS):
            directory = options.directory / "run"
            job = Job(way, False, directory, options.size)
            saved = _run(name, job, options)
            saves[way].append(_losses(saved))
            ran_over[way] += saved[0]["ran_over"]
            if way == STOCK:
                fresh.append(_first(saved))
            for kind, samples in resumes.items():
                if kind == "cold":
                    _forget(directory)
                resumed = _run(name, Job(way, True, directory, options.size), options)
                _must_go_on(saved, resumed, f"{name}, {way}")
                samples[way].append(_first(resumed))
            remove(directory)
        rounds += 1
        report.console.print(f"  round {rounds} of {options.rounds}", style="dim")
    anew = {key: statistics.median(one[key] for one in fresh) for key in fresh[0]}
    report.add(f"{name}: saves", saves)
    report.add(f"{name}: fresh start", {STOCK: fresh})
    for kind, of_ways in resumes.items():
        less = {
            way: [{key: one[key] - anew[key] for key in one} for one in samples]
            for way, samples in of_ways.items()
        }
        report.add(f"{name}: resume, {kind}", less)
    _show(report, name, rounds)
    for way, count in ran_over.items():
        if count:
            of = rounds * SAVES
            report.note(f"{name}, {way}: {count} of {of} saves lasted longer than {TOUCHED} steps")
    if rounds < options.rounds:
        report.note(f"{name}: {rounds} rounds, in {SECTION_SECONDS:.0f} s")
    lines = len(framework.lines)
    report.note(f"{name}: {lines} lines: {'; '.join(framework.lines)}")


def _run(name: str, job: Job, options: Options) -> list[dict[str, Any]]:
    rendezvous = options.directory / "rendezvous"
    try:
        return in_children(RANKS, on_rank, name, job, RANKS, rendezvous, timeout_s=900.0)
    finally:
        remove(rendezvous)


def _losses(ranks: list[dict[str, Any]]) -> Sample:
    """What the saves of a job took, by the clock of the first rank; all ranks step together."""
    first = ranks[0]

    def durations(marks: dict[int, float]) -> dict[int, float]:
        return {step: marks[step] - marks[step - 1] for step in marks if step - 1 in marks}

    seconds = durations(first["marks"])
    cpu = [durations(one["cpu"]) for one in ranks]
    cpu_seconds = {step: sum(one[step] for one in cpu) for step in seconds}
    saves = range(PERIOD, LAST + 1, PERIOD)
    quiet = {save: [*range(save + TOUCHED + 1, save + PERIOD + 1)] for save in saves[:-1]}
    all_quiet = [step for steps in quiet.values() for step in steps]
    lost: dict[str, list[float]] = {"seconds": [], "blocked_seconds": [], "saving_cpu_seconds": []}
    for save in saves:
        touched = range(save + 1, save + TOUCHED + 1)
        # The machine may be slower or faster after a while.
        beside = [*quiet.get(save - PERIOD, ()), *quiet.get(save, ())]
        for key, of in (("seconds", seconds), ("saving_cpu_seconds", cpu_seconds)):
            idle = statistics.median(of[step] for step in beside)
            lost[key].append(sum(of[step] for step in touched) - TOUCHED * idle)
        lost["blocked_seconds"].append(first["begun"][save + 1] - first["marks"][save])
    sample = {f"first_{key}": values[0] for key, values in lost.items()}
    sample |= {f"later_{key}": statistics.mean(values[1:]) for key, values in lost.items()}
    before = range(WARM + 1, PERIOD + 1)
    idle = statistics.median(seconds[step] for step in all_quiet)
    rests = [
        seconds[step] - statistics.median(seconds[other] for other in steps)
        for steps in quiet.values()
        for step in steps
    ]
    return sample | {
        "before_seconds": sum(seconds[step] for step in before) - len(before) * idle,
        "noise_seconds": TOUCHED**0.5 * statistics.stdev(rests),
        "step_seconds": idle,
    }


def _first(ranks: list[dict[str, Any]]) -> Sample:
    return {
        "seconds": max(one["until_step"] for one in ranks),
        "resuming_cpu_seconds": sum(one["cpu_until_step"] for one in ranks),
    }


def _must_go_on(saved: list[dict[str, Any]], resumed: list[dict[str, Any]], who: str) -> None:
    for rank, (before, after) in enumerate(zip(saved, resumed, strict=True)):
        expected = {step: loss for step, loss in before["losses"].items() if step > LAST}
        if after["losses"] != expected:
            raise WrongBytes(f"{who}, rank {rank}: losses {after['losses']}, not {expected}")
        if after["digest"] != before["digest"]:
            raise WrongBytes(f"{who}, rank {rank}: other parameters after {len(expected)} steps")


def _forget(directory: Path) -> None:
    """Take files out of the page cache; those of others stay."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _share(report: Report, group: str, metric: str) -> float | None:
    """Ours over the framework's; None where one is not above zero, since what was taken off was
    uncertain by more than the difference."""
    both = [report.median(group, way, metric) for way in WAYS]
    if any(value is None or value <= 0 for value in both):
        return None
    return report.ratio(group, OURS, STOCK, metric)


def _share_of_lost(report: Report, group: str, save: str, count: int) -> float | None:
    """At most how much of the time that the framework's own saves lose is lost with ours. None
    where the framework's is within the noise of so many saves."""
    lost = {way: report.median(group, way, f"{save}_seconds") for way in WAYS}
    noise = {way: report.median(group, way, "noise_seconds") for way in WAYS}
    ours, stock = ((lost[way] or 0.0, (noise[way] or 0.0) / count**0.5) for way in (OURS, STOCK))
    return None if stock[0] <= stock[1] else max(ours) / stock[0]


def _milliseconds(seconds: float) -> float:
    return seconds * 1e3


def _show(report: Report, name: str, rounds: int) -> None:
    report.table(
        f"{name}: lost by a save, ms",
        f"{name}: saves",
        {
            "before_seconds": ("before", _milliseconds),
            "first_seconds": ("first", _milliseconds),
            "first_blocked_seconds": ("blocked", _milliseconds),
            "later_seconds": ("later", _milliseconds),
            "later_blocked_seconds": ("blocked", _milliseconds),
            "later_saving_cpu_seconds": ("CPU, later", _milliseconds),
            "noise_seconds": ("noise", _milliseconds),
            "step_seconds": ("a quiet step", _milliseconds),
        },
    )
    for save, count in (("first", rounds), ("later", rounds * (SAVES - 1))):
        report.target(
            f"{name}: lost by a {save} save, ours over the framework's",
            _share_of_lost(report, f"{name}: saves", save, count),
            at_most=0.1,
        )
    for kind in KINDS:
        group = f"{name}: resume, {kind}"
        report.table(
            f"{group}, ms",
            group,
            {
                "seconds": ("until a step", _milliseconds),
                "resuming_cpu_seconds": ("CPU", _milliseconds),
            },
        )
        report.target(
            f"{group}, ours over the framework's", _share(report, group, "seconds"), at_most=0.5
        )


SECTIONS = {name: partial(measure, name) for name in FRAMEWORKS}

if __name__ == "__main__":
    preload(
        "_frameworks",
        *(
            module
            for framework in FRAMEWORKS.values()
            for module in framework.modules
            if importlib.util.find_spec(module.partition(".")[0]) is not None
        ),
    )
    sys.exit(run("frameworks", SECTIONS, __doc__ or "", rounds=3, size_mib=1152))
