"""What all commands share: the terminal, JSON, sizes, and the exit status."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from pyckpt.printable import printable

__all__ = [
    "BAD",
    "FAILED",
    "GOOD",
    "AsJson",
    "complain",
    "console",
    "format_bytes",
    "print_json",
]

GOOD = 0
BAD = 1
"""The command was carried out, and its answer is bad: damage, a difference, something missing."""
FAILED = 2
"""The command was not carried out."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]
"""The type of each command's option ``--json``."""


def console(*, stderr: bool = False) -> Console:
    """A console for standard output, or for standard error. What goes to a pipe is not cut."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Prints ``value`` as JSON, one document to standard output."""
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")


def complain(error: BaseException | str) -> None:
    """Prints one line to standard error, in which nothing from a checkpoint moves the cursor."""
    text = str(error) or type(error).__name__ if isinstance(error, BaseException) else error
    print(f"pyckpt: {printable(text)}", file=sys.stderr)


def format_bytes(count: float) -> str:
    """A size for people, in decimal units: ``1.50 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"
