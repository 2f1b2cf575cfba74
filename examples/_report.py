"""What the demo shows at its end: a table of the saves, and a plot of the loss."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a demo that runs over ssh has no display

from _runs import SAVE_EVERY, STEPS, Kill, Run
from matplotlib import pyplot as plt
from rich.table import Table

__all__ = ["plot", "saves_table"]

STYLES = ("cyan", "default")  # of the two writers in the table


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
