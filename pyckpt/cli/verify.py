"""``pyckpt verify``: whether all bytes are those that were saved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyckpt.cli.output import (
    BAD,
    FAILED,
    GOOD,
    AsJson,
    complain,
    counted,
    format_bytes,
    local,
    on_other_nodes,
    print_json,
    progress_bar,
    say,
)
from pyckpt.printable import seconds_text

if TYPE_CHECKING:
    from pyckpt.tools.verifying import Verified

__all__ = ["verify"]

_SHOWN = 50


def verify(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(parser=local, help="Checkpoints, or directories of checkpoints."),
    ],
    as_json: AsJson = False,
) -> None:
    """Read checkpoints, and compare all bytes with the checksums that were saved.

    The first damage does not end it. What stock PyTorch wrote has checksums in its items, which are
    compared, and none in its metadata. In the directory of one of several nodes, the files of that
    node are read. The answer is bad (exit status 1) if anything is damaged.
    """
    from pyckpt.errors import CorruptCheckpoint, PyckptError, UnsafeCheckpoint
    from pyckpt.tools import verifying
    from pyckpt.tools.below import below

    status = GOOD
    documents: list[dict[str, Any]] = []
    targets: list[tuple[Path, int | None]] = []
    for path in checkpoints:
        try:
            targets += below(path)
        except OSError as error:
            complain(error)
            documents.append({"path": str(path), "good": None, "error": str(error)})
            status = status or FAILED
    for directory, rank in targets:
        name = str(directory) + ("" if rank is None else f" (rank {rank})")
        start = time.perf_counter()
        document: dict[str, Any] = {"path": str(directory), "rank": rank}
        try:
            with progress_bar(directory.name) as progress:
                found = verifying.verify(directory, rank=rank, progress=progress)
        except (CorruptCheckpoint, UnsafeCheckpoint) as error:
            status = BAD
            documents.append({**document, "good": False, "error": str(error)})
            if not as_json:
                say(f"{name}: DAMAGED: {error}")
            continue
        except (OSError, PyckptError) as error:
            status = status or FAILED
            documents.append({**document, "good": None, "error": str(error)})
            complain(f"{name}: {error}")
            continue
        seconds = time.perf_counter() - start
        status = status if found.good else BAD
        documents.append({**document, **_json(found), "seconds": seconds})
        if not as_json:
            _show(name, found, seconds)
    if as_json:
        print_json(documents)
    raise typer.Exit(status)


def _show(name: str, found: Verified, seconds: float) -> None:
    speed = f"{format_bytes(found.bytes)} in {seconds_text(seconds)}"
    if seconds > 0:
        speed += f" ({format_bytes(found.bytes / seconds)}/s)"
    if found.good:
        say(f"{name}: good: {counted(found.items, 'item')}, {speed}")
    else:
        keys = {damage.key for damage in found.damages if damage.key is not None}
        say(
            f"{name}: DAMAGED: {counted(len(keys), 'value')}; {found.items} items are good, {speed}"
        )
        for damage in found.damages[:_SHOWN]:
            where = damage.file if damage.offset is None else f"{damage.file} at {damage.offset}"
            say(f"  {where}: " + (f"{damage.key}: " if damage.key else "") + damage.what)
        if len(found.damages) > _SHOWN:
            say(f"  and {len(found.damages) - _SHOWN} more, which --json lists")
    if found.elsewhere:
        say(f"  {on_other_nodes(len(found.elsewhere), found.files)}")
    if found.by_stock:
        say("  saved by stock PyTorch: its items have checksums, its metadata has none")
    elif not found.metadata_checked:
        say("  its metadata has no checksum")
    if found.unchecked:
        count = len(found.unchecked)
        say(f"  {counted(count, 'value')} without a checksum, such as {found.unchecked[0]}")


def _json(found: Verified) -> dict[str, Any]:
    return {
        "good": found.good,
        "items": found.items,
        "hashed": found.hashed,
        "bytes": found.bytes,
        "files": found.files,
        "elsewhere": found.elsewhere,
        "by_stock": found.by_stock,
        "metadata_checked": found.metadata_checked,
        "unchecked": found.unchecked,
        "damages": [damage._asdict() for damage in found.damages],
    }
