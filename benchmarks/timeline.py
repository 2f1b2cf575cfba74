"""What a recording of a timeline costs, and the picture of a save in docs/profiling.md.

    python benchmarks/timeline.py [--dir DIR] [--rounds 11] [--size-mib 1024] [--picture FILE]

Saves take turns with and without `pyckpt.record_timeline`; medians of the processor time and of the
wall-clock time are compared. Then one asynchronous save and a load are recorded and drawn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

import torch
from _common import ROOT
from torch.distributed.checkpoint.state_dict_saver import async_save

import pyckpt
from pyckpt.tools.picture import draw
from pyckpt.tools.trace import read_traces

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, default=ROOT / "build")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "timeline.svg")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    state = {
        f"layer{i}": torch.empty((arguments.size_mib << 20) // 64 // 4).normal_() for i in range(64)
    }
    place = Path(tempfile.mkdtemp(prefix="pyckpt-", dir=arguments.dir))
    try:
        compare(state, place, arguments.rounds)
        record(state, place, arguments.picture)
    finally:
        shutil.rmtree(place)


def compare(state: dict[str, torch.Tensor], place: Path, rounds: int) -> None:
    wall: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    trace = place / "trace.json"
    for number in range(rounds + 1):
        for recorded in (False, True) if number % 2 else (True, False):
            with pyckpt.record_timeline(trace) if recorded else nullcontext():
                start, used = time.perf_counter(), time.process_time()
                pyckpt.save(state, place / "checkpoint", overwrite=True)
                took, used = time.perf_counter() - start, time.process_time() - used
            if number:
                wall[recorded].append(took)
                processor[recorded].append(used)
    events = json.loads(trace.read_text())["traceEvents"]
    spans = sum(event["ph"] == "X" for event in events)
    print(f"{spans} spans, {trace.stat().st_size / 1e3:.0f} kB")
    for what, times in (("wall-clock", wall), ("processor", processor)):
        without, recorded_too = (statistics.median(times[r]) for r in (False, True))
        spread = (max(times[False]) - min(times[False])) / without
        print(
            f"{what}: {without:.4f} s without, {recorded_too:.4f} s with "
            f"({recorded_too / without - 1:+.2%}; spread without {spread:.0%})"
        )


def record(state: dict[str, torch.Tensor], place: Path, picture: Path) -> None:
    stager = pyckpt.PinnedStager()
    stager.prewarm(state)
    trace = place / "trace.json"
    for _ in range(2):  # the first makes the memory and the plan
        shutil.rmtree(place / "checkpoint", ignore_errors=True)
        with pyckpt.record_timeline(trace):
            writer = pyckpt.DirectWriter(place / "checkpoint", stager=stager)
            future = async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
            assert isinstance(future, Future)
            future.result()
            pyckpt.load(state, place / "checkpoint")
    draw(read_traces([trace]), picture)
    print(f"{picture}: {picture.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
