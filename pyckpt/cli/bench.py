"""``pyckpt bench``: what the disk, the memory and the GPU give, and which settings to use."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from pyckpt.cli.output import BAD, AsJson, complain, console, format_bytes, print_json
from pyckpt.printable import printable

__all__ = ["bench"]

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}


def bench(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory on the disk to measure.")
    ],
    size: Annotated[
        str, typer.Option(help="Bytes to save and load: 500MB, 4GiB. The disk needs twice that.")
    ] = "1GB",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and settings.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what saves and loads can reach here, and print which settings to use.

    Plain writes and reads of the disk, copies, checksums, and a GPU if there is one; pyckpt's saves
    and loads by number of threads and size of slots; PyTorch's FileSystemWriter beside them. All
    files are removed at the end, also if the command is interrupted. Exit status 1: bytes that were
    read are not those that were written.
    """
    from rich.table import Table

    from pyckpt.tools.bench import WrongBytes
    from pyckpt.tools.bench import bench as measure

    # As an exception, so that the files are removed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    say = console(stderr=True)
    try:
        with say.status("") as status:

            def on_step(step: str) -> None:
                if sys.stderr.isatty():
                    status.update(step)
                else:
                    print(step, file=sys.stderr, flush=True)

            result = measure(directory, size=_bytes(size), quick=quick, on_step=on_step)
    except WrongBytes as error:
        complain(error)
        raise typer.Exit(BAD) from None
    if as_json:
        print_json(result.as_dict())
        return
    table = Table(title_justify="left", title=f"GB/s, of {result.rounds} rounds")
    for heading in ("", "median", "slowest", "fastest"):
        table.add_column(heading, justify="right" if heading else "left")
    for series in result.series:
        rates = (series.rate, series.slowest, series.fastest)
        table.add_row(series.name, *(f"{rate:.2f}" for rate in rates))
    screen = console()
    screen.print(f"{printable(result.path)}, with {format_bytes(result.size)}")
    screen.print(table)
    if not result.direct:
        screen.print("This file system has no direct I/O: see pyckpt doctor.")
    best = result.settings
    if best.line:
        screen.print(f"Best here: {best.threads}, {best.slots}. Before the first save:\n")
        screen.print(f"    {best.line}")
    else:
        screen.print("The default settings suit this machine; nothing to configure.")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"--size {text}: not a size such as 500MB or 4GiB")
    return int(float(found[1]) * _UNITS[found[2]])
