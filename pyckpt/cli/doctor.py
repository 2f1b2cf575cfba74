"""``pyckpt doctor``: what a save depends on, and what to do about what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyckpt.cli.output import BAD, AsJson, console, print_json
from pyckpt.printable import printable

__all__ = ["doctor"]

_STYLES = {"good": "green", "note": "cyan", "warning": "yellow", "bad": "bold red"}


def doctor(
    path: Annotated[
        Path, typer.Argument(help="A directory that checkpoints are saved to, or will be.")
    ] = Path("."),
    as_json: AsJson = False,
) -> None:
    """Look for what makes saves and loads fail, or slow, and say what to do.

    Looks at the versions, the GPU, the memory, limits and environment of this process, and really
    tries the disk. Exit status 1: something is wrong by which saves or loads fail.
    """
    from rich.table import Table
    from rich.text import Text

    from pyckpt.tools.doctor import examine

    diagnosis = examine(path)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        table = Table(box=None, show_header=False, padding=(0, 1))
        for finding in diagnosis.findings:
            said = Text(printable(finding.found))
            if finding.advice:
                said.append(f"\n-> {printable(finding.advice)}", style="bold")
            level = Text(finding.level, style=_STYLES[finding.level])
            table.add_row(level, Text(printable(finding.about)), said)
        screen = console()
        screen.print(f"pyckpt doctor, of {printable(diagnosis.path)}")
        screen.print(table)
        bad = sum(finding.level == "bad" for finding in diagnosis.findings)
        screen.print(f"{bad} bad, {diagnosis.warnings} warnings")
    if diagnosis.bad:
        raise typer.Exit(BAD)
