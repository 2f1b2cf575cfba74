"""What all commands share: the terminal, JSON, sizes, and the exit status."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pyckpt.printable import digits, printable
from pyckpt.remote.address import is_url, local_path

__all__ = [
    "BAD",
    "FAILED",
    "GOOD",
    "AsJson",
    "complain",
    "console",
    "counted",
    "damage_is_bad",
    "finite",
    "format_bytes",
    "format_seconds",
    "local",
    "logging_to_stderr",
    "on_other_nodes",
    "print_json",
    "print_table",
    "progress_bar",
    "say",
]

GOOD = 0
BAD = 1
"""The command was carried out, and its answer is bad: damage, a difference, something missing."""
FAILED = 2
"""The command was not carried out."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]
"""The type of each command's option ``--json``."""


def local(text: str) -> Path:
    """An argument that is a path of a file system, and not the URL of an object store."""
    path = local_path(text)
    if is_url(path):
        raise typer.BadParameter(
            f"{text} is a URL, which this command does not take; download it (aws s3 cp "
            "--recursive, say), and give it the directory"
        )
    return Path(path)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process as if the answer were bad


def console(*, stderr: bool = False) -> Console:
    """A console for standard output, or for standard error. What goes to a pipe is not cut."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return _Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def say(text: str = "") -> None:
    """Prints a line to standard output, in which nothing from a checkpoint moves the cursor."""
    sys.stdout.write(printable(text) + "\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> None:
    """Prints a table to standard output, also one of a hundred thousand rows. Cells may be text
    from a checkpoint.

    Args:
        right: a character for each column: ">" where it is flush right, anything else where not.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    table = [list(headings), *cells] if any(headings) else cells
    widths = [max(map(_width, column)) for column in zip(*table, strict=True)]
    flush = [right[i : i + 1] == ">" for i in range(len(widths))]
    head = len(table) - len(cells)
    bold = sys.stdout.isatty()
    for number, row in enumerate(table):
        parts = []
        for cell, width, is_right in zip(row, widths, flush, strict=True):
            space = " " * (width - _width(cell))
            parts.append(space + cell if is_right else cell + space)
        line = "  ".join(parts).rstrip()
        sys.stdout.write(f"\x1b[1m{line}\x1b[0m\n" if bold and number < head else line + "\n")


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


@contextmanager
def damage_is_bad() -> Iterator[None]:
    """Makes damage that the block meets the answer of a command, and no failure of it."""
    from pyckpt.errors import CorruptCheckpoint

    try:
        yield
    except CorruptCheckpoint as error:
        complain(error)
        raise typer.Exit(BAD) from None


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how far a command is, in bytes, where standard error is a terminal.

    Yields a function that takes the bytes done and the bytes in all. Any thread may call it.
    """
    terminal = console(stderr=True)
    if not terminal.is_terminal:
        yield lambda done, total: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal, transient=True) as progress:
        task = progress.add_task(printable(what), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _Complaints(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        complain(record.getMessage())


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Meanwhile, warnings of the package are printed as `complain` prints them, not logged."""
    logger = logging.getLogger("pyckpt")
    handler = _Complaints(logging.WARNING)
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


def print_json(value: Any) -> None:
    """Prints ``value`` as JSON, one document to standard output. It has no infinities and NaNs:
    say None for them."""
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")


def finite(number: float | None) -> float | None:
    """A number as JSON can have it: None for infinities and NaN."""
    return number if number is not None and math.isfinite(number) else None


def complain(error: BaseException | str) -> None:
    """Prints one line to standard error, in which nothing from a checkpoint moves the cursor."""
    text = str(error) or type(error).__name__ if isinstance(error, BaseException) else error
    print(f"pyckpt: {printable(text)}", file=sys.stderr)


def counted(count: int, what: str) -> str:
    """A number of things: ``1 value``, ``2 values``."""
    return f"{count} {what}{'s' * (count != 1)}"


def on_other_nodes(count: int, files: int) -> str:
    """How many files of a checkpoint other nodes have, in words."""
    return f"{count} of {counted(files, 'file')} are on other nodes"


def format_bytes(count: float) -> str:
    """A size for people, in decimal units: ``1.50 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{digits(count)} {unit}"
        count /= 1000
    return f"{digits(count)} PB"


def format_seconds(seconds: float) -> str:
    """A time for people, of one unit: ``3 h``. Never negative: clocks of machines differ."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
