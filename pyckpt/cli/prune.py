"""``pyckpt prune``: removes checkpoints that are not to be kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pyckpt.cli.output import (
    FAILED,
    AsJson,
    complain,
    format_bytes,
    local,
    print_json,
    print_table,
    say,
)

__all__ = ["prune"]


def prune(
    directory: Annotated[
        Path, typer.Argument(parser=local, help="The directory of a Checkpointer.")
    ],
    keep_last: Annotated[int, typer.Option(min=0, help="Keep so many of the newest.")],
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Keep also multiples of this step.")
    ] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC", help="Keep also the best by this metric.")
    ] = None,
    best: Annotated[int, typer.Option(min=1, help="How many of the best to keep.")] = 1,
    best_is_max: Annotated[
        bool, typer.Option("--max", help="The best has the largest value, not the smallest.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them. Else, only say which.")] = False,
    job_ended: Annotated[
        bool,
        typer.Option("--job-ended", help="The job that saved here last has ended, surely."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the checkpoints of a directory that are not to be kept; without --yes, say which.

    Always kept: the newest checkpoint, final ones, damaged ones, those that a process reads or
    writes, and those that hold files which no save has written. Entries of other names are not
    touched. While the job that saves here runs, nothing is removed.
    """
    from pyckpt.tools import pruning
    from pyckpt.train.store.retention import Retention

    chosen = None if keep_best is None else (keep_best, best, _mode(best_is_max))
    plan = pruning.plan(directory, Retention(keep_last, keep_every, chosen))
    failed: dict[Path, str] = {}
    if yes and plan.going:
        for entry, why in pruning.prune(plan, job_ended=job_ended):
            if why:
                failed[entry.path] = why
                complain(f"{entry.path} was not removed, or not all of it: {why}")
    if as_json:
        print_json(
            {
                "directory": str(directory),
                "dry_run": not yes,
                "entries": [_json(entry, yes, failed.get(entry.path)) for entry in plan.entries],
            }
        )
    else:
        _show(plan, yes, failed)
    if failed:
        raise typer.Exit(FAILED)


def _mode(is_max: bool) -> Any:
    return "max" if is_max else "min"


def _json(entry: Any, yes: bool, failure: str | None) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "step": entry.step,
        "action": entry.action,
        "why": entry.why,
        "bytes": entry.bytes,
        "removed": yes and entry.action == "remove" and failure is None,
        "failure": failure,
    }


def _show(plan: Any, yes: bool, failed: dict[Path, str]) -> None:
    rows = []
    for entry in plan.entries:
        action = entry.action
        if yes and action == "remove":
            action = "failed" if entry.path in failed else "removed"
        size = format_bytes(entry.bytes) if entry.bytes else ""
        rows.append([entry.path.name, action, size, entry.why])
    if rows:
        print_table(["checkpoint", "", "size", "why"], rows, right="<<>")
        say()
    going = [entry for entry in plan.going if entry.path not in failed]
    size = format_bytes(sum(entry.bytes for entry in going))
    if yes:
        say(f"removed {len(going)} of {len(rows)}, {size}")
    elif going:
        say(f"would remove {len(going)} of {len(rows)}, {size}; --yes removes them")
    else:
        say("nothing to remove")
