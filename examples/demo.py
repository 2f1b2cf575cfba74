"""Kill a training run in the middle of a save, resume it, and look for a difference.

    python examples/demo.py

Runs `train.py` three times: without interruption, then killed with SIGKILL while a checkpoint is
being written, then resumed, by `pyckpt.Checkpointer`, from the last one that is valid. The losses
must be those of the uninterrupted run bit for bit, and so must the final weights and moments. Stock
`dcp.load` must read the last checkpoint. The exit status is 0 only if every claim that is printed
was checked and holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a demo that runs over ssh has no display

from matplotlib import pyplot as plt
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

TRAIN = Path(__file__).with_name("train.py")
STEPS = 48
SAVE_EVERY = 8
KILL_FROM = 3 * SAVE_EVERY  # the first save that may be hit; two have been committed by then
STALLED_SECONDS = 60  # without a step or a save, a run hangs
# A save takes tens of milliseconds; a poll costs microseconds.
POLL_SECONDS = 0.0005
STYLES = ("cyan", "default")  # of the two writers in the table

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


# ------------------------------------------------------------------------------------- the claims


def check(holds: bool, claim: str, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)
    console.print(f"[green]✓[/] {escape(claim)}", highlight=False)


def check_kill(kill: Kill, directory: Path) -> None:
    files = data_files(kill.checkpoint)
    check(
        bool(files) and not is_committed(kill.checkpoint),
        f"SIGKILL hit the save of step {kill.step}: {kill.written / 1e6:.0f} of "
        f"{kill.whole / 1e6:.0f} MB written, no .metadata",
        f"the kill did not hit a save: {kill.checkpoint} holds "
        f"{sorted(path.name for path in kill.checkpoint.glob('*'))}",
    )
    previous = checkpoint_path(directory, kill.step - SAVE_EVERY)
    check(
        is_committed(previous),
        f"The save before it, of step {kill.step - SAVE_EVERY}, is committed",
        f"{previous} has no .metadata, although its save had ended before the next began",
    )


def check_resume(kill: Kill, resumed: Run) -> int:
    events = resumed.of("resume")
    step = events[0]["step"] if events else 0
    check(
        step == kill.step - SAVE_EVERY and min(resumed.losses(), default=0) == step + 1,
        f"Resumed from step {step}, the newest valid checkpoint",
        f"the resumed run started from step {step}, not {kill.step - SAVE_EVERY}",
    )
    left = sorted(path.name for path in kill.checkpoint.iterdir())
    check(
        len(left) == 2 and left[0] == ".metadata",
        f"It saved step {kill.step} again into the torn directory, and left no debris there",
        f"after the second save of step {kill.step} its directory holds {left}",
    )
    return step


READ_WITH_STOCK = """
import sys, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
state = _load_state_dict_from_keys("model", checkpoint_id=sys.argv[1])
assert "pyckpt" not in sys.modules
print(sum(tensor.numel() for tensor in state["model"].values()))
"""


def check_stock(checkpoint: Path, parameters: int) -> None:
    """Read a checkpoint in a process that knows nothing of pyckpt."""
    command = [sys.executable, "-W", "ignore", "-c", READ_WITH_STOCK, str(checkpoint)]
    result = subprocess.run(command, capture_output=True, text=True)
    check(
        result.returncode == 0 and int(result.stdout) == parameters,
        f"Stock PyTorch reads all {parameters:,} parameters of {checkpoint.name}, without pyckpt",
        f"stock PyTorch read {result.stdout or 'nothing'} of {checkpoint}: {result.stderr}",
    )


def check_losses(reference: Run, killed: list[Run], resumed: Run) -> None:
    expected = reference.losses()
    everything = list(range(1, STEPS + 1))
    if list(expected) != everything:
        raise Failed(f"the uninterrupted run logged {len(expected)} steps, not {STEPS}")
    if len(set(expected.values())) < STEPS // 2:
        raise Failed("the losses of the uninterrupted run repeat: equal losses prove nothing")
    seen: set[int] = set()
    compared = 0
    for run in [*killed, resumed]:
        for step, loss in run.losses().items():
            if loss != expected[step]:
                raise Failed(
                    f"the loss of step {step} is {float.fromhex(loss)!r} in {run.log.name}, and "
                    f"{float.fromhex(expected[step])!r} without interruption"
                )
            seen.add(step)
            compared += 1
    check(
        sorted(seen) == everything,
        f"All {compared} losses equal those of the uninterrupted run, bit for bit",
        f"the killed and resumed runs miss steps {sorted(set(everything) - seen)}",
    )
    digests = [run.of("end")[0]["digest"] for run in (reference, resumed)]
    check(
        digests[0] == digests[1],
        f"So do the final weights and moments (SHA-256 {digests[0][:12]}…)",
        f"the final weights or moments differ: SHA-256 {digests[0]} and {digests[1]}",
    )


# ------------------------------------------------------------------------------------- the report


def saves_table(reference: Run) -> Table:
    """Every save of one run, in which the two writers took turns."""
    table = Table(
        title="Saves of the uninterrupted run, two writers taking turns",
        caption="blocked: the call of async_save. to commit: from its return until "
        "the checkpoint is whole and on disk. GB/s: bytes over to commit.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("writer", no_wrap=True)
    for column in ("step", "blocked ms", "to commit s", "GB/s"):
        table.add_column(column, justify="right", no_wrap=True)

    names = ["", ""]
    rows: tuple[list[tuple[float, ...]], ...] = ([], [])
    for save in sorted(reference.of("save"), key=lambda save: save["step"]):
        which = 0 if save["step"] % SAVE_EVERY == 0 else 1
        to_commit = save["committed_seconds"] - save["blocked_seconds"]
        numbers = (1e3 * save["blocked_seconds"], to_commit, save["bytes"] / 1e9 / to_commit)
        names[which] = save["writer"]
        rows[which].append(numbers)
        table.add_row(names[which], str(save["step"]), *cells(*numbers), style=STYLES[which])
    table.add_section()
    for which in (0, 1):
        medians = map(statistics.median, zip(*rows[which], strict=True))
        table.add_row(names[which], "median", *cells(*medians), style=f"bold {STYLES[which]}")
    return table


def cells(blocked_ms: float, to_commit: float, speed: float) -> tuple[str, str, str]:
    return f"{blocked_ms:.0f}", f"{to_commit:.2f}", f"{speed:.2f}"


def plot(path: Path, reference: Run, kill: Kill, resumed: Run, resumed_from: int) -> None:
    def curve(*runs: Run) -> tuple[list[int], list[float]]:
        losses = {step: loss for run in runs for step, loss in run.losses().items()}
        return list(losses), [float.fromhex(loss) for loss in losses.values()]

    expected = dict(zip(*curve(reference), strict=True))
    killed_steps, killed_losses = curve(*kill.runs)
    resumed_steps, resumed_losses = curve(resumed)

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 5.6), sharex=True, height_ratios=(5, 1), layout="constrained"
    )
    grey, orange, blue, red = "#c4c8cf", "#e07b00", "#1763b6", "#c1121f"
    top.plot(list(expected), list(expected.values()), color=grey, lw=7, label="uninterrupted")
    top.plot(killed_steps, killed_losses, color=orange, lw=1.8, label="killed")
    top.plot(
        resumed_steps,
        resumed_losses,
        color=blue,
        lw=1.8,
        ls=(0, (3, 1.5)),
        label=f"resumed from step {resumed_from}",
    )
    top.plot(
        [resumed_from],
        [expected[resumed_from]],
        "o",
        ms=9,
        mfc="white",
        mec=blue,
        mew=2,
        label="last committed checkpoint",
        zorder=5,
    )
    for axes in (top, bottom):
        axes.axvline(kill.step, color=red, lw=1.5, ls="--")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    top.annotate(
        f"SIGKILL in the save of step {kill.step}",
        (kill.step, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        color=red,
        va="top",
    )
    top.set_ylabel("loss (nats per byte)")
    top.set_title("Killed in the middle of a save, and resumed", loc="left")
    top.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.92))

    largest = 1e-6  # a few units in the last place of the losses
    for steps, losses, colour, size in (
        (killed_steps, killed_losses, orange, 9),
        (resumed_steps, resumed_losses, blue, 4),
    ):
        differences = [loss - expected[step] for step, loss in zip(steps, losses, strict=True)]
        largest = max(largest, *map(abs, differences))
        bottom.plot(steps, differences, ".", ms=size, color=colour)
    bottom.set_ylim(-1.5 * largest, 1.5 * largest)
    bottom.set_yticks([-largest, 0, largest], [f"{-largest:.0e}", "0", f"{largest:.0e}"])
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    bottom.set_xlim(0, STEPS + 1)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# ------------------------------------------------------------------------------------------- main


def demo(out: Path) -> None:
    checkpoints = out / "checkpoints"
    reference_directory, stock_directory = checkpoints / "uninterrupted", checkpoints / "stock"
    directory = checkpoints / "killed"

    reference = run_to_the_end(
        "uninterrupted",
        "uninterrupted",
        out,
        *("--checkpoints", reference_directory, "--compare", stock_directory),
    )
    # They have been timed; a gigabyte need not lie about during the rest.
    shutil.rmtree(reference_directory)
    shutil.rmtree(stock_directory)

    kill = train_and_kill(out, directory)
    check_kill(kill, directory)
    resumed = run_to_the_end("resumed", "resumed", out, "--checkpoints", directory, "--resume")
    resumed_from = check_resume(kill, resumed)
    check_stock(checkpoint_path(directory, STEPS), resumed.of("start")[0]["parameters"])
    check_losses(reference, kill.runs, resumed)

    console.print()
    console.print(saves_table(reference))
    if not all(save["direct"] for save in reference.of("save") if save["writer"] == "Checkpointer"):
        console.print("This file system refused direct I/O, so pyckpt wrote buffered.")
    path = out / "loss.png"
    plot(path, reference, kill, resumed, resumed_from)
    console.print(f"\nThe plot of the loss: {path}", highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Kill a training run in the middle of a save, resume it, compare."
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints (0.7 GB)")
    args = parser.parse_args()

    checkpoints = args.out / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    checkpoints.mkdir(parents=True)
    started = time.perf_counter()
    try:
        demo(args.out)
    except Failed as failure:
        console.print(f"[bold red]✗ failed:[/] {escape(str(failure))}", highlight=False)
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(checkpoints, ignore_errors=True)
    console.print(f"All of it holds, in {time.perf_counter() - started:.0f} s.", style="bold green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
