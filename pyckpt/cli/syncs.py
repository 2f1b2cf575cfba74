"""``pyckpt syncs``: how often the host waited, by a report of Nsight Systems, or by two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyckpt.cli.output import BAD, AsJson, console, print_json
from pyckpt.printable import printable

if TYPE_CHECKING:
    from pyckpt.profiling.nsys import Comparison, Difference, Report

__all__ = ["syncs"]


def syncs(
    report: Annotated[
        Path, typer.Argument(help="An .nsys-rep, or what nsys export --type sqlite made of one.")
    ],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER",
            help="Another report, from before a change. If REPORT has more synchronisations, the "
            "exit status is 1.",
        ),
    ] = None,
    range: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only what happens in this NVTX range.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count synchronisations and copies in a report of Nsight Systems.

    Record with: nsys profile --trace cuda,nvtx python train.py
    """
    from pyckpt.profiling.nsys import compare, read

    shown = read(report)
    if against is None:
        if as_json:
            print_json(shown.as_dict(range=range))
        else:
            _show_report(shown, range=range, console=console())
        return
    comparison = compare(read(against), shown, range=range)
    if as_json:
        print_json(comparison.as_dict())
    else:
        _show_comparison(comparison, console=console())
    if comparison.more_syncs:
        raise typer.Exit(BAD)


def _show_report(report: Report, *, range: str | None, console: Console) -> None:
    version = f", nsys {report.version}" if report.version else ""
    console.print(printable(f"{report.path}{version}"), style="bold")
    for note in report.notes:
        console.print(f"  {note}", style="yellow")
    names: list[str | None] = [None, *sorted(report.ranges)] if range is None else [range]
    rows = []
    for name in names:
        totals = report.totals(range=name)
        rows.append(
            (
                "all of the report" if name is None else name,
                "" if name is None else totals.instances,
                *(totals.stream_syncs, totals.device_syncs, totals.event_syncs),
                *(totals.blocking_copy_calls, totals.waited_seconds * 1e3),
                *(totals.d2h_copies, totals.d2h_bytes, totals.h2d_copies, totals.h2d_bytes),
            )
        )
    headings = (
        *("NVTX range", "times", "stream", "device", "event", "blocking\ncopies", "waited\nms"),
        *("D2H", "D2H\nbytes", "H2D", "H2D\nbytes"),
    )
    _print(console, "Synchronisations and copies", headings, rows)
    where = "" if range is None else f" in {range}"
    _print(
        console,
        f"Waits{where}",
        ("thread", "API", "for", "calls", "ms"),
        ((r.thread, r.api, r.kind, r.count, r.seconds * 1e3) for r in report.syncs(range=range)),
    )
    _print(
        console,
        f"Copies{where}",
        ("thread", "API", "direction", "from", "to", "copies", "bytes", "ms"),
        (
            (
                *(r.thread, r.api, r.direction, r.source, r.destination, r.count, r.bytes),
                r.seconds * 1e3,
            )
            for r in report.copies(range=range)
        ),
    )


def _show_comparison(comparison: Comparison, *, console: Console) -> None:
    console.print(f"before: {printable(comparison.before)}\nafter:  {printable(comparison.after)}")
    where = "" if comparison.range is None else f" in {comparison.range}"
    headings = ("", "before", "after", "change")
    for title, differences in (
        ("Totals", comparison.totals),
        ("Waits", comparison.syncs),
        ("Copies", comparison.copies),
    ):
        rows = [_row(difference) for difference in differences]
        _print(console, title + where, headings, rows)


def _row(difference: Difference) -> tuple[Any, ...]:
    change = difference.change
    sign = "+" if change > 0 else ""
    return difference.name, difference.before, difference.after, sign + _text(change)


def _print(
    console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    rows = [[_text(value) for value in row] for row in rows]
    for index, heading in enumerate(headings):
        numbers = all(row[index].strip("+-0123456789,.") == "" for row in rows)
        table.add_column(heading, justify="right" if numbers and index else "left")
    for row in rows:
        # A plain str in a table would be read as markup.
        table.add_row(*(Text(cell) for cell in row))
    if rows:
        console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else printable(str(value))
