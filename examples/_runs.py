"""Runs of train.py: those that are left alone, and one that is killed in the middle of a save."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = [
    "SAVE_EVERY",
    "STEPS",
    "Failed",
    "Kill",
    "Run",
    "checkpoint_path",
    "console",
    "data_files",
    "is_committed",
    "run_to_the_end",
    "train_and_kill",
]

TRAIN = Path(__file__).with_name("train.py")
STEPS = 48
SAVE_EVERY = 8
KILL_FROM = 3 * SAVE_EVERY  # the first save that may be hit; two have been committed by then
STALLED_SECONDS = 60  # without a step or a save, a run hangs
# A save takes tens of milliseconds; a poll costs microseconds.
POLL_SECONDS = 0.0005

console = Console()


class Failed(Exception):
    """A claim of the demo does not hold; the message says which."""


# ------------------------------------------------------------------------------------- processes


@dataclass
class Run:
    """One process of train.py and what it has logged so far."""

    process: subprocess.Popen[bytes]
    log: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0
    _heard: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, name: str, out: Path, *arguments: str | Path) -> Run:
        log = out / f"{name}.jsonl"
        command: list[str | Path] = [sys.executable, TRAIN]
        command += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        # All runs get one number of threads, because the rounding of sums depends on it.
        command += ["--threads", str(min(4, len(os.sched_getaffinity(0)))), *arguments]
        # Threads of torch that spin while they wait for one another would take the processors
        # from the threads that save, and from whatever else the machine is doing.
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        if importlib.util.find_spec("pyckpt") is None:  # built in this checkout, not installed
            paths = [str(TRAIN.parent.parent), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with log.open("wb") as output, log.with_suffix(".stderr").open("wb") as errors:
            process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment)
        return cls(process, log)

    def poll(self) -> bool:
        """Take in new lines; False once the process is gone and all it wrote has been read."""
        running = self.process.poll() is None  # asked before reading, so that no line is missed
        with self.log.open("rb") as log:
            log.seek(self._read)
            # A killed process may leave half a line, which is no record.
            whole = log.read().rpartition(b"\n")[0]
        if whole:
            self._read += len(whole) + 1
            self._heard = time.monotonic()
            self.records += [json.loads(line) for line in whole.splitlines()]
        if running and time.monotonic() - self._heard > STALLED_SECONDS:
            raise Failed(f"{self.log.stem}: nothing was logged for {STALLED_SECONDS} s")
        return running

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == event]

    def losses(self) -> dict[int, str]:
        """Step to loss, as the exact hexadecimal text that the process printed."""
        return {record["step"]: record["loss"] for record in self.of("step")}

    def stderr(self) -> str:
        return self.log.with_suffix(".stderr").read_text(errors="replace").strip()


@contextmanager
def phase(title: str) -> Iterator[Callable[..., None]]:
    """A progress line; what it yields is called with the run to bring the line up to date."""
    columns = (
        TextColumn("[bold]{task.description:<15}"),
        BarColumn(bar_width=30),
        TextColumn("step {task.completed:>3.0f}/{task.total:.0f}  {task.fields[note]:<36}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task: TaskID = progress.add_task(title, total=STEPS, note="starting")

        def update(run: Run, note: str | None = None) -> None:
            if note is None and (steps := run.of("step")):
                note = f"loss {float.fromhex(steps[-1]['loss']):.3f}"
                progress.update(task, completed=steps[-1]["step"])
            if note is not None:
                progress.update(task, note=note)

        yield update


def run_to_the_end(title: str, name: str, out: Path, *arguments: str | Path) -> Run:
    run = Run.start(name, out, *arguments)
    try:
        with phase(title) as update:
            while run.poll():
                update(run)
                time.sleep(0.05)
            update(run)
    finally:
        run.process.kill()
    if run.process.wait() != 0:
        raise Failed(f"the {name} run ended with status {run.process.returncode}:\n{run.stderr()}")
    if warning := run.stderr():
        console.print(warning, style="dim", markup=False)
    return run


# ------------------------------------------------------------------------------------- the kill


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def data_files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("__0_*.distcp"))


def is_committed(checkpoint: Path) -> bool:
    return (checkpoint / ".metadata").exists()


def bytes_written(path: Path) -> int:
    """Bytes of a file that were written; space that is only reserved for it does not count."""
    total = end = 0
    with path.open("rb") as file:
        while True:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            except OSError:  # ENXIO: no data after here
                return total
            total += end - start


def is_half_written(checkpoint: Path, whole: int) -> bool:
    written = sum(map(bytes_written, data_files(checkpoint)))
    # The order matters: seen data and after it no .metadata, the save was under way in between.
    return written > whole / 4 and not is_committed(checkpoint)


@dataclass
class Kill:
    checkpoint: Path
    step: int
    runs: list[Run]  # one, or more if a save was committed in the instant before the kill
    written: int
    whole: int


def train_and_kill(out: Path, directory: Path) -> Kill:
    """Kill a run in the middle of a save, and make sure that it was the middle."""
    runs: list[Run] = []
    target = KILL_FROM
    while target <= STEPS:
        arguments = ("--checkpoints", directory, "--resume")
        run = Run.start(f"killed-{len(runs)}" if runs else "killed", out, *arguments)
        runs.append(run)
        try:
            with phase("killed") as update:
                seen = whole = 0
                while run.poll():
                    if not whole and (saves := run.of("save")):
                        whole = saves[0]["bytes"]
                    if whole and is_half_written(checkpoint_path(directory, target), whole):
                        break
                    if len(run.records) > seen:
                        seen = len(run.records)
                        update(run)
                    if is_committed(checkpoint_path(directory, target)):
                        target += SAVE_EVERY  # it was faster than the poll; wait for the next one
                    time.sleep(POLL_SECONDS)
                run.process.kill()
                status = run.process.wait()
                run.poll()
                update(run)
                if status == -signal.SIGKILL:
                    update(run, f"SIGKILL while saving step {target}")
        finally:
            run.process.kill()
        if status == 0:
            break
        if status != -signal.SIGKILL:
            raise Failed(
                f"the run to be killed ended by itself, with status {status}:\n{run.stderr()}"
            )
        checkpoint = checkpoint_path(directory, target)
        if not is_committed(checkpoint):
            written = sum(map(bytes_written, data_files(checkpoint)))
            return Kill(checkpoint, target, runs, written, whole)
        # The commit won the race by a hair. The run goes on from there to its next save.
        target += SAVE_EVERY
    raise Failed("no save could be caught half-written: each was committed before the kill hit it")
