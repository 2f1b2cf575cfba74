"""``pyckpt ls``: the checkpoints in a directory."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pyckpt.cli.output import (
    BAD,
    AsJson,
    finite,
    format_bytes,
    format_seconds,
    print_json,
    print_table,
    say,
)

if TYPE_CHECKING:
    from pyckpt.tools.listing import Listed

__all__ = ["ls"]


def ls(
    directory: Annotated[str, typer.Argument(help="The directory of the checkpoints, or URL.")],
    naming: Annotated[
        str | None,
        typer.Option(help="How checkpoints are named, as in 'checkpoint-{}'. [step-NNNNNNNN]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a directory, and what else is there.

    The answer is bad (exit status 1) if a checkpoint is damaged or cannot be read, or if there is
    no valid one.
    """
    from pyckpt.tools.listing import listing

    found = listing(directory, naming=naming)
    if as_json:
        print_json([_json(entry) for entry in found])
    else:
        _show(found)
    if any(entry.is_bad for entry in found) or not any(e.state == "valid" for e in found):
        raise typer.Exit(BAD)


def _json(entry: Listed) -> dict[str, object]:
    metrics = {name: finite(number) for name, number in entry.metrics.items()}
    return {**asdict(entry), "metrics": metrics}


def _ranks(entry: Listed) -> str:
    if entry.ranks is None:
        return ""
    # Where each node has a directory of its own, others have the rest.
    here = f"{entry.ranks - entry.elsewhere} of " if entry.elsewhere else ""
    return f"{here}{entry.ranks}"


def _show(found: list[Listed]) -> None:
    rows = [
        [
            str(entry.step),
            "" if entry.age is None else format_seconds(entry.age),
            "" if entry.bytes is None else format_bytes(entry.bytes),
            _ranks(entry),
            entry.state + (f": {entry.reason}" if entry.reason else ""),
            "final" if entry.final else "",
            " ".join(f"{name}={number:.6g}" for name, number in entry.metrics.items()),
        ]
        for entry in found
        if entry.step is not None
    ]
    if rows:
        headings = ["step", "age", "size", "ranks", "state", "", "metrics"]
        print_table(headings, rows, right=">>>>")
        shared = sum(entry.bytes_shared for entry in found)
        if shared:
            size = format_bytes(sum(entry.bytes or 0 for entry in found) - shared)
            say(f"{size} on disk, since checkpoints share files of frozen parts")
    else:
        say("no checkpoints")
    others = [[entry.name, entry.reason] for entry in found if entry.step is None]
    if others:
        say()
        print_table(["other entries", ""], others)
