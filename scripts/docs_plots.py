"""Draws the plots of the documentation from the committed results of the benchmarks.

python scripts/docs_plots.py [DIRECTORY]

Each picture says in its metadata of which results it was made; tests/docs compares.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"

_OURS, _STOCK, _DISK = "#3949ab", "#b0bec5", "#90a4ae"

Row = tuple[str, float, str]
"""A label, a value, a colour."""


def digest(*names: str) -> str:
    """By which a picture tells the results that it was drawn from."""
    content = b"".join((RESULTS / f"{name}.json").read_bytes() for name in names)
    return hashlib.sha256(content).hexdigest()


class Results:
    """The medians in one file of results."""

    def __init__(self, name: str) -> None:
        self._content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())

    def median(self, section: str, variant: str, metric: str = "seconds") -> float:
        return float(self._content["results"][section][variant][metric]["median"])

    def speed(self, section: str, variant: str) -> float:
        """GB/s of the large state."""
        size: int = self._content["parameters"]["size_bytes"]
        return size / self.median(section, variant) / 1e9

    @property
    def machine(self) -> str:
        """In words, for the line below a plot."""
        machine = self._content["machine"]
        return (
            f"{machine['date'][:10]}, {machine['cores']} cores of a virtual machine, "
            f"{machine['file_system']}, torch {machine['torch']}, medians"
        )


# --- the pictures ---------------------------------------------------------------------------------


def lost_guarded(stall: Results) -> list[Row]:
    return [
        ("pyckpt", stall.median("guarded", "pyckpt"), _OURS),
        (
            "FileSystemWriter,\nDefaultStager",
            stall.median("guarded", "FileSystemWriter, DefaultStager"),
            _STOCK,
        ),
        ("FileSystemWriter", stall.median("guarded", "FileSystemWriter (stock)"), _STOCK),
    ]


def lost_small(stall: Results) -> list[Row]:
    return [
        ("pyckpt", stall.median("small", "pyckpt"), _OURS),
        (
            "FileSystemWriter,\nDefaultStager",
            stall.median("small", "FileSystemWriter, DefaultStager"),
            _STOCK,
        ),
        ("FileSystemWriter", stall.median("small", "FileSystemWriter (stock)"), _STOCK),
    ]


def saved(save: Results) -> list[Row]:
    threads = [1, 2, 4]
    return [
        ("the disk (fio)", save.speed("large", "fio"), _DISK),
        ("DirectWriter", save.speed("large", "DirectWriter"), _OURS),
        *(
            (
                f"FileSystemWriter,\n{count} thread{'s' * (count > 1)}",
                save.speed("large", f"FileSystemWriter, thread_count={count}"),
                _STOCK,
            )
            for count in threads
        ),
    ]


def loaded(load: Results) -> list[Row]:
    return [
        ("the disk (fio)", load.speed("large", "fio, our file"), _DISK),
        ("pyckpt.load", load.speed("large", "pyckpt.load, our file"), _OURS),
        ("DirectReader", load.speed("large", "DirectReader under dcp.load, our file"), _OURS),
        ("FileSystemReader", load.speed("large", "FileSystemReader, our file"), _STOCK),
    ]


def processor_time(save: Results, load: Results) -> list[Row]:
    return [
        (
            "save: pyckpt",
            1e3 * save.median("mixed", "DirectWriter, known plan", "cpu_seconds"),
            _OURS,
        ),
        (
            "save: stock",
            1e3 * save.median("mixed", "FileSystemWriter, thread_count=1", "cpu_seconds"),
            _STOCK,
        ),
        ("load: pyckpt", 1e3 * load.median("mixed", "pyckpt.load, our file", "cpu_seconds"), _OURS),
        (
            "load: stock",
            1e3 * load.median("mixed", "FileSystemReader, our file", "cpu_seconds"),
            _STOCK,
        ),
    ]


def overview(path: Path) -> None:
    """What the README shows: what a save takes from training, and the speed of the disk."""
    save, load, stall = Results("save"), Results("load"), Results("stall")
    _draw(
        path,
        [
            ("Training time lost to one save of 2 GiB", "seconds", lost_guarded(stall)),
            (
                "Saving 2 GiB, durable",
                "GB/s",
                [*saved(save)[:2], max(saved(save)[2:], key=lambda r: r[1])],
            ),
            ("Loading 2 GiB, from the disk", "GB/s", loaded(load)),
        ],
        ("stall", "save", "load"),
        f"benchmarks/stall.py, save.py, load.py; {stall.machine}",
    )


def stall(path: Path) -> None:
    results = Results("stall")
    _draw(
        path,
        [
            ("Lost to a save of 2 GiB, under the step guard", "seconds", lost_guarded(results)),
            ("Lost to a save of 5,000 small tensors", "seconds", lost_small(results)),
        ],
        ("stall",),
        f"benchmarks/stall.py; {results.machine}",
    )


def speeds(path: Path) -> None:
    save, load = Results("save"), Results("load")
    _draw(
        path,
        [
            ("Saving 2 GiB, durable", "GB/s", saved(save)),
            ("Loading 2 GiB, from the disk", "GB/s", loaded(load)),
            ("5,000 tensors of 16 KiB, 4,000 floats", "CPU ms", processor_time(save, load)),
        ],
        ("save", "load"),
        f"benchmarks/save.py, load.py; {save.machine}",
    )


Span = tuple[float, float, str, str]
"""From when to when, a label, a colour."""

_MADE, _BEFORE = "#9fa8da", "#eceff1"


def tiers(path: Path) -> None:
    """Where the bytes of a checkpoint are, and when. No times were measured for it."""
    mirrored: list[tuple[str, list[Span]]] = [
        ("training", [(0, 1, "", _STOCK), (1.15, 10, "goes on", _STOCK)]),
        ("memory", [(1, 3, "copy of the state", _MADE)]),
        (
            "local directory",
            [(1.3, 3, "data files", _MADE), (3, 8, "the checkpoint", _OURS)],
        ),
        (
            "mirror",
            [(3.3, 5.8, "data, under new names", _MADE), (5.8, 10, "the checkpoint", _OURS)],
        ),
        (
            "restore() reads",
            [
                (0, 3, "the checkpoint before", _BEFORE),
                (3, 8, "this one, from the local directory", _BEFORE),
                (8, 10, "from the mirror", _BEFORE),
            ],
        ),
    ]
    direct: list[tuple[str, list[Span]]] = [
        ("memory", [(1, 5.8, "a slot, and some parts of 8 MiB", _MADE)]),
        (
            "store",
            [(1.3, 5.8, "parts that nobody sees", _MADE), (5.8, 10, "the checkpoint", _OURS)],
        ),
        (
            "load() reads",
            [(0, 5.8, "the checkpoint before", _BEFORE), (5.8, 10, "this one", _BEFORE)],
        ),
    ]
    events = [(1.0, "save"), (3.0, ".metadata:\nlocal commit")]
    events += [(5.8, ".metadata:\nin the mirror"), (8.0, "pruned\nhere")]
    _lanes(
        path,
        [
            ("Checkpointer(directory, mirror=URL)", mirrored, events),
            ("DirectWriter(URL)", direct, [events[0], (5.8, ".metadata:\ncommit")]),
        ],
    )


PLOTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "overview.svg": (overview, ("stall", "save", "load")),
    "speeds.svg": (speeds, ("save", "load")),
    "stall.svg": (stall, ("stall",)),
    "tiers.svg": (tiers, ()),
}
"""Each picture, and the results that it is drawn from."""


def _draw(
    path: Path,
    panels: Sequence[tuple[str, str, Sequence[Row]]],
    sources: tuple[str, ...],
    below: str,
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "pyckpt"  # the same file each time
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.1 * len(panels), 2.7), squeeze=False)
    for axis, (title, unit, rows) in zip(axes[0], panels, strict=True):
        labels, values, colours = zip(*rows, strict=True)
        drawn = axis.barh(range(len(rows)), values, color=colours, height=0.65)
        axis.set_yticks(range(len(rows)), labels, fontsize=8)
        axis.invert_yaxis()
        axis.bar_label(drawn, [f"{value:.3g}" for value in values], padding=3, fontsize=8)
        axis.set_xlim(0, 1.18 * max(values))
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(unit, fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.text(0.5, 0.015, below, ha="center", fontsize=7, color="#546e7a")
    figure.savefig(path, metadata={"Date": None, "Description": digest(*sources)})
    plt.close(figure)


def _lanes(
    path: Path,
    panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[Span]]], Sequence[tuple[float, str]]]],
) -> None:
    """Draw what is where, one lane a place, along the time."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "pyckpt"
    from matplotlib import pyplot as plt

    heights = [len(lanes) + 1 for _, lanes, _ in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8.4, 0.42 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, (title, lanes, events) in zip(axes[:, 0], panels, strict=True):
        for row, (_, spans) in enumerate(lanes):
            for begin, end, label, colour in spans:
                axis.barh(row, end - begin, left=begin, color=colour, height=0.7)
                dark = colour == _OURS
                axis.text(
                    (begin + end) / 2,
                    row,
                    label,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if dark else "#263238",
                )
        for at, label in events:
            axis.axvline(at, color="#546e7a", linewidth=0.8, linestyle=":")
            axis.text(at, -0.65, label, ha="center", va="bottom", fontsize=7, color="#546e7a")
        axis.set_yticks(range(len(lanes)), [name for name, _ in lanes], fontsize=8)
        axis.set_ylim(len(lanes) - 0.5, -0.6)
        axis.set_xlim(0, 10)
        axis.set_xticks([])
        axis.set_title(title, fontsize=10, pad=24)
        axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Description": digest()})
    plt.close(figure)


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    directory.mkdir(parents=True, exist_ok=True)
    for name, (plot, _) in PLOTS.items():
        plot(directory / name)
        print(directory / name)
