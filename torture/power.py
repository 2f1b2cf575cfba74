"""Has the power fail at each instant of real runs, in models of several file systems, and looks.

    python -m torture.power                        all instants, all models, and the checker's check
    python -m torture.power --resume               the same, from where it was stopped
    python -m torture.power --minutes 1 --seed 7   a sample of the states

`torture.power_scenarios` says what is run, `torture.recording` records it, `torture.crash_states`
says what a power failure may leave, and `torture.power_checks` what must hold of that. Each state
is written as a real directory, in memory, and read by pyckpt and by stock PyTorch.

The checker is checked, too: the recordings are replayed with each sync left out, one after the
other. Then it must object, or `torture.power_syncs` says why nothing relies on the sync.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torture import results
from torture.crash_states import MODELS, Instant, Model, State, instants, states
from torture.power_checker import Checker, Tally, Violation, new_checker, quiet
from torture.power_scenarios import SCENARIOS, where
from torture.power_syncs import Sync, summed, unexplained, without_each_sync
from torture.recording import Recording, record

_SAMPLES = 2
"""States at random, for each instant and model, besides those at the corners."""
_SHOWN = 5
_KEPT = 20

_console = Console(stderr=True)


def _all_states(
    name: str, recording: Recording, seed: int
) -> Iterator[tuple[Instant, Model, State]]:
    for when in instants(recording):
        instant = Instant(recording, when)
        for model in MODELS:
            generator = random.Random(f"{seed} {name} {when} {model}")
            for state in states(instant, model, generator, samples=_SAMPLES):
                yield instant, model, state


def try_all(name: str, recording: Recording, checker: Checker, seed: int) -> list[Violation]:
    """Look at the states of all instants of a run."""
    found: list[Violation] = []
    for instant, model, state in _all_states(name, recording, seed):
        violation = checker.look(SCENARIOS[name], instant, model, state)
        found += [] if violation is None else [violation]
    return found


def try_some(
    recordings: dict[str, Recording], checker: Checker, seed: int, until: float
) -> list[Violation]:
    """Look at the states of instants at random, until a time of `time.monotonic`."""
    generator = random.Random(seed)
    places = [(name, when) for name, one in recordings.items() for when in instants(one)]
    generator.shuffle(places)
    found: list[Violation] = []
    for name, when in places:
        instant = Instant(recordings[name], when)
        for model in MODELS:
            made = list(states(instant, model, generator, samples=_SAMPLES))
            for state in generator.sample(made, min(4, len(made))):
                if time.monotonic() > until:
                    return found
                violation = checker.look(SCENARIOS[name], instant, model, state)
                found += [] if violation is None else [violation]
    return found


# One run, with all of its syncs and without each.


@dataclass
class Findings:
    """What was found in one run."""

    tally: Tally = field(default_factory=Tally)
    tally_without: Tally = field(default_factory=Tally)
    """What was tried with a sync left out."""
    violations: list[Violation] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)


def all_of(name: str, recording: Recording, *, seed: int) -> Findings:
    """Look at the states of all instants of a run, and then leave out each sync."""
    with quiet(), new_checker() as checker:
        violations = try_all(name, recording, checker, seed)
        tally, checker.tally = checker.tally, Tally()
        syncs = without_each_sync(name, recording, checker, seed)
        return Findings(tally, checker.tally, violations, syncs)


def report(name: str, recording: Recording, *, seed: int) -> dict[str, Any]:
    """The same, as JSON."""
    begun = time.process_time()
    found = all_of(name, recording, seed=seed)
    return {
        "calls": len(recording.operations),
        "instants": len(instants(recording)),
        "states": found.tally.states,
        "states_with_repetitions": found.tally.modelled,
        "states_by_model": dict(found.tally.by_model),
        "violations": len(found.violations),
        "first_violations": [asdict(one) for one in found.violations[:_KEPT]],
        "states_without_a_sync": found.tally_without.states,
        "syncs_left_out": len(found.syncs),
        "syncs_noticed": sum(one.noticed for one in found.syncs),
        "syncs": summed(found.syncs),
        "processor_seconds": round(time.process_time() - begun),
    }


def _write(scenarios: dict[str, dict[str, Any]], seed: int, output: Path) -> None:
    sums = (
        *("states", "states_with_repetitions", "violations", "states_without_a_sync"),
        *("syncs_left_out", "syncs_noticed", "processor_seconds"),
    )
    content = {
        "seed": seed,
        "is_complete": scenarios.keys() == SCENARIOS.keys(),
        **{what: sum(one[what] for one in scenarios.values()) for what in sums},
        "scenarios": {name: scenarios[name] for name in SCENARIOS if name in scenarios},
    }
    results.write("power", content, output)


def _record(names: Sequence[str]) -> dict[str, Recording]:
    with tempfile.TemporaryDirectory(prefix="pyckpt-power-") as folder:
        base = Path(folder)
        runs = {name: where(base, name) for name in names}
        script = [sys.executable, "-m", "torture.power_scenarios", str(base), *runs]
        return record(script, runs, base / "log")


def _sample(recordings: dict[str, Recording], seed: int, until: float, output: Path) -> int:
    with quiet(), new_checker() as checker:
        violations = try_some(recordings, checker, seed, until)
    tally = checker.tally
    content = {
        "seed": seed,
        "states": tally.states,
        "states_with_repetitions": tally.modelled,
        "states_by_model": dict(tally.by_model),
        "violations": [asdict(one) for one in violations],
    }
    results.write("power", content, output)
    for one in violations[:_SHOWN]:
        _console.print(f"[red]{one.scenario}, {one.how}, after {one.after}:[/] {one.error}")
    _console.print(f"{tally.states} states, {len(violations)} violations")
    return 1 if violations or not tally.states else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="a sample of the states, for so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that look")
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument(
        "--resume", action="store_true", help="leave out what the output has, of the same commit"
    )
    parser.add_argument("--output", type=Path, default=results.RESULTS / "power.json")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    begun = time.monotonic()
    done: dict[str, dict[str, Any]] = {}
    if arguments.resume:
        done = results.earlier(arguments.output, "scenarios", seed=arguments.seed)
    recordings = _record([name for name in arguments.scenarios if name not in done])
    _console.print(
        f"{len(recordings)} runs were recorded, "
        f"{sum(len(one.operations) for one in recordings.values())} calls, "
        f"{time.monotonic() - begun:.0f} s"
    )
    if arguments.minutes is not None:
        until = time.monotonic() + 60 * arguments.minutes  # after the recording
        return _sample(recordings, arguments.seed, until, arguments.output)
    # Forked: each process has the recordings, and imports nothing anew. The long ones come first.
    context = multiprocessing.get_context("fork")
    by_length = sorted(recordings, key=lambda name: -len(recordings[name].operations))
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        names = {
            pool.submit(report, name, recordings[name], seed=arguments.seed): name
            for name in by_length
        }
        for future in as_completed(names):
            name, found = names[future], future.result()
            done[name] = found
            _write(done, arguments.seed, arguments.output)
            _console.print(
                f"{name}: {found['states']} states, {found['violations']} bad; "
                f"{found['syncs_noticed']} of {found['syncs_left_out']} syncs noticed; "
                f"{time.monotonic() - begun:.0f} s"
            )
    print(arguments.output)
    for name, found in done.items():
        for one in found["first_violations"][:_SHOWN]:
            _console.print(f"[red]{name}, {one['how']}, after {one['after']}:[/] {one['error']}")
    for what in unexplained(done):
        _console.print(f"[red]not noticed when left out:[/] {what}")
    states = sum(one["states"] for one in done.values())
    violations = sum(one["violations"] for one in done.values())
    _console.print(f"{states} states, {violations} violations")
    return 1 if violations or unexplained(done) or not states else 0


if __name__ == "__main__":
    sys.exit(main())
