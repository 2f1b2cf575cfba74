"""``pyckpt timeline``: what the threads of a save did, as sums and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyckpt.cli.output import BAD, AsJson, complain, console, format_bytes, print_json
from pyckpt.printable import printable

__all__ = ["timeline"]

_MOVES = {"checksum", "copy", "read", "stage", "write"}
"""What moves bytes, so that it has a rate."""


def timeline(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="What pyckpt.record_timeline wrote; of several ranks of one machine, all of them.",
        ),
    ],
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it: out.svg, out.png, ... (needs matplotlib)."),
    ] = None,
    title: Annotated[str, typer.Option(help="Above the picture.")] = "",
    as_json: AsJson = False,
) -> None:
    """Sum up what each kind of thread did, and draw it.

    Record with: with pyckpt.record_timeline("trace.json"): ... https://ui.perfetto.dev opens the
    file, too. Exit status 1: nothing was recorded.
    """
    from pyckpt.tools.trace import read_traces

    trace = read_traces(traces)
    if as_json:
        print_json(trace.as_dict())
    if not trace.spans:
        complain("nothing was recorded: no save or load ended while the recording ran")
        raise typer.Exit(BAD)
    if picture is not None:
        from pyckpt.tools.picture import draw

        draw(trace, picture, title=title)
    if as_json:
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{trace.seconds:.3f} s", title_justify="left")
    for heading in ("threads", "what", "times", "s", "bytes", "GB/s"):
        table.add_column(heading, justify="left" if heading in ("threads", "what") else "right")
    for row in trace.rows():
        has_rate = row.name in _MOVES and row.bytes and row.seconds > 0
        table.add_row(
            Text(printable(row.threads)),
            Text(printable(row.name)),
            str(row.count),
            f"{row.seconds:.3f}",
            format_bytes(row.bytes) if row.bytes else "",
            f"{row.bytes / row.seconds / 1e9:.2f}" if has_rate else "",
        )
    console().print(table)
