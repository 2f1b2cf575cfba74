"""Reports and comparisons as tables on a terminal. Needs rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

try:
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise ImportError(
        "tables need rich: pip install 'pyckpt[profiling]'; --json needs nothing"
    ) from error

from pyckpt.profiling.nsys.comparison import Comparison, Difference
from pyckpt.profiling.nsys.report import Report

__all__ = ["Console", "show_comparison", "show_report"]


def show_report(report: Report, *, range: str | None, console: Console) -> None:
    console.print(
        f"[bold]{report.path}[/]" + (f", nsys {report.version}" if report.version else "")
    )
    for note in report.notes:
        console.print(f"  {note}", style="yellow", markup=False)
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


def show_comparison(comparison: Comparison, *, console: Console) -> None:
    console.print(f"before: {comparison.before}\nafter:  {comparison.after}", markup=False)
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
        # Names of ranges may contain brackets, which rich would take for markup.
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    if rows:
        console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
