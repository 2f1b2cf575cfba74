"""What a thousand ranks cost: plans, metadata and the planning of loads, beside stock.

    python benchmarks/scale.py [--dir DIR] [--rounds 3] [--quick] [--only SECTION]

Ranks are simulated in one process, one after the other: real planners, writers and readers under
real DCP, with a stand-in for its collectives that pickles what a rank sends and unpickles it where
it would arrive. Nothing goes over a network, so bytes are told beside seconds (docs/scale.md says
what they come to). Seconds are CPU seconds of all threads, since those are what a coordinator
spends while everyone waits. Each size runs in a process of its own, whose peak of resident memory
is its own; the cyclic collector is on, as it is in programs.

The state is a model and its optimizer's as FSDP2 shards them: each key is cut in rows over all
ranks, 64 bytes a rank, and beside them there are 8 tensors that all ranks have and 5 plain values.
Ranks whose parts of a save are alike but for their number (all but some dozen) are represented by
one of them: it plans, writes and answers; the others' files are links to its own. All ranks' plans
are really made. What was saved last is loaded, by one rank, and compared.

compare   64 and 256 ranks of 1,000 keys, stock and pyckpt: the first save, the second save of the
          same state (pyckpt alone: stock plans again as it did), the load. Stock also loads ours.
growth    pyckpt alone at more ranks of 1,000 keys, and 256 ranks of more keys.
large     1,024 ranks of 3,000 keys.
steady    4,096 ranks of 1,000 keys, for its second save.

Results go to benchmarks/results/scale.json; ``python benchmarks/_scale_plot.py`` puts them into
docs/scale.md, and draws docs/scale.svg. The exit code is 1 if bytes were wrong, else 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

from _common import MIB, Options, Report, Sample, in_children, remove, run
from _scale_ranks import OURS, STOCK, STOCK_ON_OURS, load, save

_TIMEOUT_S = 3600.0


class Size(NamedTuple):
    ranks: int
    keys: int

    def __str__(self) -> str:
        return f"{self.ranks:,} x {self.keys:,}"


COMPARED = (Size(64, 1000), Size(256, 1000))
GROWING = (
    *(Size(ranks, 1000) for ranks in (16, 128, 512, 1024)),
    *(Size(256, keys) for keys in (100, 300, 3000)),
)
LARGE = Size(1024, 3000)
STEADY = Size(4096, 1000)


def _sizes(options: Options, sizes: Iterable[Size]) -> list[Size]:
    """The sizes to be measured: where it is enough to see that it runs, small ones."""
    if not options.quick:
        return list(sizes)
    return sorted({Size(max(2, size.ranks // 64), size.keys // 100 + 2) for size in sizes})


def measure(
    report: Report, options: Options, size: Size, variants: Iterable[str] = (OURS,), rounds: int = 1
) -> None:
    """Save and load at one size; adds the groups "first", "second" and "load"."""
    samples: dict[str, dict[str, list[Sample]]] = {}
    report.console.print(f"[bold]{size} (ranks x keys)[/]")
    for number in range(rounds):
        for variant in variants:
            directory = options.directory / variant
            directory.mkdir(exist_ok=True)
            done = in_children(1, save, variant, *size, directory, timeout_s=_TIMEOUT_S)
            for stage, sample in done[0].items():
                samples.setdefault(stage, {}).setdefault(variant, []).append(sample)
            loaders = [variant]
            if variant == OURS and STOCK in variants:
                loaders.append(STOCK_ON_OURS)
            for loader in loaders:
                [loaded] = in_children(1, load, loader, *size, directory, timeout_s=_TIMEOUT_S)
                samples.setdefault("load", {}).setdefault(loader, []).append(loaded["load"])
            remove(directory)
        if rounds > 1:
            report.console.print(f"  round {number + 1} of {rounds}", style="dim")
    for stage, of_variants in samples.items():
        report.add(f"{stage} {size}", of_variants)
        report.table(
            {"first": "The first save", "second": "The second save", "load": "A load"}[stage]
            + f", {size}: CPU seconds",
            f"{stage} {size}",
            _LOAD_COLUMNS if stage == "load" else _SAVE_COLUMNS,
        )


def _seconds(value: float) -> float:
    return value


def _mebibytes(value: float) -> float:
    return value / MIB


_SAVE_COLUMNS = {
    "rank_seconds": ("a rank", _seconds),
    "plans_bytes": ("plans, MiB", _mebibytes),
    "plans_unpickled_seconds": ("unpickled", _seconds),
    "global_plan_seconds": ("planned", _seconds),
    "answers_pickled_seconds": ("answered", _seconds),
    "results_unpickled_seconds": ("results", _seconds),
    "metadata_seconds": ("metadata", _seconds),
    "metadata_bytes": ("its MiB", _mebibytes),
    "coordinator_seconds": ("all", _seconds),
    "peak_growth_bytes": ("peak, MiB", _mebibytes),
}
_LOAD_COLUMNS = {
    "decode_seconds": ("decoded", _seconds),
    "rank_plan_seconds": ("planned", _seconds),
    "plan_bytes": ("plan, MiB", _mebibytes),
    "plans_unpickled_seconds": ("plans unpickled", _seconds),
    "answers_pickled_seconds": ("answered", _seconds),
    "rank_read_seconds": ("read", _seconds),
    "peak_growth_bytes": ("peak, MiB", _mebibytes),
}


# --- sections ---------------------------------------------------------------------------------


def measure_compared(report: Report, options: Options) -> None:
    sizes = _sizes(options, COMPARED)
    for size in sizes:
        measure(report, options, size, (STOCK, OURS), rounds=min(options.rounds, 3))
    size = sizes[-1]
    report.target(
        f"{size}: the coordinator's first save, stock's over ours",
        report.ratio(f"first {size}", STOCK, OURS, "coordinator_seconds"),
        at_least=20,
        unit="x",
    )
    report.target(
        f"{size}: metadata and plan of a rank's load, stock's over ours",
        report.ratio(f"load {size}", STOCK, OURS, "rank_seconds"),
        at_least=20,
        unit="x",
    )


def measure_growth(report: Report, options: Options) -> None:
    sizes = _sizes(options, GROWING)
    for size in sizes[:2] if options.quick else sizes:
        measure(report, options, size)


def measure_large(report: Report, options: Options) -> None:
    [size] = _sizes(options, [LARGE])
    measure(report, options, size)
    first, load = f"first {size}", f"load {size}"
    report.target(
        f"{size}: first save, CPU at the coordinator",
        report.median(first, OURS, "coordinator_seconds"),
        at_most=20,
        unit="s",
    )
    report.target(
        f"{size}: first save, peak memory of the coordinator",
        _scaled(report.median(first, OURS, "peak_growth_bytes"), 1 << 30),
        at_most=4,
        unit="GiB",
    )
    report.target(
        f"{size}: a rank's metadata and plan of a load",
        report.median(load, OURS, "rank_seconds"),
        at_most=3,
        unit="s",
    )
    peak = report.median(load, OURS, "peak_growth_bytes")
    file = report.median(load, OURS, "metadata_bytes")
    report.target(
        f"{size}: peak memory of a rank's load beyond the file's size",
        None if peak is None or file is None else (peak - file) / 1e6,
        at_most=500,
        unit="MB",
    )


def measure_steady(report: Report, options: Options) -> None:
    [size] = _sizes(options, [STEADY])
    measure(report, options, size)
    second = f"second {size}"
    report.target(
        f"{size}: second save, CPU at the coordinator with the metadata written",
        report.median(second, OURS, "coordinator_seconds"),
        at_most=2,
        unit="s",
    )
    report.target(
        f"{size}: without it",
        report.median(second, OURS, "without_metadata_seconds"),
        at_most=0.2,
        unit="s",
    )
    report.target(
        f"{size}: second save, CPU at another rank",
        report.median(second, OURS, "rank_seconds"),
        at_most=0.1,
        unit="s",
    )
    bytes_, wall = (
        report.median(second, OURS, name) or 0.0
        for name in ("metadata_bytes", "bare_write_wall_seconds")
    )
    report.note(f"a bare write of {bytes_ / MIB:,.0f} MiB, with fsync: {wall:.2f} s")


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


SECTIONS = {
    "compare": measure_compared,
    "growth": measure_growth,
    "large": measure_large,
    "steady": measure_steady,
}

if __name__ == "__main__":
    sys.exit(run("scale", SECTIONS, __doc__ or ""))
