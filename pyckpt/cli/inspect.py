"""``pyckpt inspect``: what a checkpoint holds."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyckpt.cli.output import (
    BAD,
    AsJson,
    complain,
    counted,
    damage_is_bad,
    finite,
    format_bytes,
    on_other_nodes,
    print_json,
    print_table,
    say,
)

if TYPE_CHECKING:
    from pyckpt.tools.contents import Contents, Key
    from pyckpt.tools.statistics import Statistics

__all__ = ["inspect"]

_ROWS = 100
_FILES_SHOWN = 2


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint's directory, or URL.")],
    key: Annotated[
        str | None,
        typer.Argument(help="A key, the beginning of some, or a pattern such as '*.weight'."),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Show the largest values only, this many of them.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Show so many levels of the tree of keys.")
    ] = None,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Read the tensors: min, max, mean, std, NaNs, infinities."),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Whose checkpoint, where each rank saved its own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the keys of a checkpoint with shapes, dtypes, shards, bytes and files; and who saved it.

    Nothing but the metadata is read, unless --stats is given. The answer is bad (exit status 1) if
    there is no such key, the metadata or the value shown is damaged, or --stats finds damage.
    """
    from pyckpt.tools.contents import contents

    with damage_is_bad():
        found = contents(checkpoint, rank=rank)
    keys = found.matching(key)
    if key is not None and not keys:
        complain(f"{checkpoint} has no key {key!r}{_near(key, found)}")
        raise typer.Exit(BAD)
    if top is not None:
        keys = sorted(keys, key=lambda one: -one.bytes)[:top]
    numbers: dict[str, Statistics | str] = {}
    if stats:
        from pyckpt.tools.statistics import statistics

        numbers = dict(statistics(found, [one.name for one in keys if one.kind == "tensor"]))
    is_one = len(keys) == 1 and keys[0].name == key
    if as_json:
        print_json(_json(found, keys, numbers, rank, parts=is_one))
    elif is_one:
        with damage_is_bad():
            _show_value(found, keys[0], numbers)
    else:
        if key is None and top is None:
            _show_saved(found, rank)
            say()
        if numbers:
            _show_numbers(keys, numbers)
        elif top is not None:
            print_table(_HEADINGS, [[one.name, *_columns(one)] for one in keys], right=_RIGHT)
        else:
            _show_tree(keys, depth, is_chosen=key is not None)
    if any(isinstance(one, str) and not _is_opaque(one) for one in numbers.values()):
        raise typer.Exit(BAD)


_HEADINGS = ["key", "dtype", "shape", "shards", "size", "files"]
_RIGHT = "<<<>><"


def _near(key: str, found: Contents) -> str:
    """Keys that may be meant."""
    import difflib

    names = [one.name for one in found.keys[:5000]]
    near = difflib.get_close_matches(key, names, n=3)
    near = near or [name for name in names if key in name][:3]
    return f"; did you mean {', '.join(near)}?" if near else ""


def _is_opaque(reason: str) -> bool:
    """Whether a tensor has no statistics because of what or where it is, and not of damage."""
    from pyckpt.tools.streams import ELSEWHERE, OPAQUE

    return reason in OPAQUE or reason == ELSEWHERE


def _columns(key: Key) -> list[str]:
    more = len(key.files) - _FILES_SHOWN
    files = ", ".join(key.files[:_FILES_SHOWN]) + (f", and {more} more" if more > 0 else "")
    if key.kind == "object":
        return ["object", "", "", format_bytes(key.bytes), files]
    shape = "x".join(map(str, key.shape)) or "()"
    if key.elements_here is not None:
        shape += f", {_here(key)}"
    return [key.dtype, shape, str(key.shards), format_bytes(key.bytes), files]


def _here(key: Key) -> str:
    """How much of a tensor one rank saved for itself."""
    return f"{key.elements_here} of {math.prod(key.shape)} elements"


def _show_saved(found: Contents, rank: int | None) -> None:
    saved = found.saved
    parts = sum(key.elements_here is not None for key in found.keys)
    when = datetime.datetime.fromtimestamp(saved.time).astimezone()
    tensors = sum(key.kind == "tensor" for key in found.keys)
    objects = len(found.keys) - tensors
    size = format_bytes(sum(found.files.values()))
    items = [
        ["path", str(found.path)],
        ["saved by", f"{saved.by}, {counted(saved.ranks, 'rank')}"],
        ["saved at", when.isoformat(" ", "seconds")],
        ["step", "" if saved.step is None else f"{saved.step}{' (final)' * saved.final}"],
        ["metrics", " ".join(f"{name}={value:.6g}" for name, value in saved.metrics.items())],
        ["save", saved.save_id or ""],
        ["metadata version", saved.version or ""],
        ["values", f"{counted(tensors, 'tensor')}, {counted(objects, 'object')}"],
        ["size", f"{size} in {counted(len(found.files), 'file')}"],
        [
            "other nodes",
            on_other_nodes(len(found.elsewhere), len(found.files)) if found.elsewhere else "",
        ],
        ["part", "" if rank is None else _part_of(rank, parts)],
    ]
    print_table(["", ""], [item for item in items if item[1]])


def _part_of(rank: int, parts: int) -> str:
    what = f"what rank {rank} saved for itself"
    return what + (f"; it has {counted(parts, 'tensor')} in part only" if parts else "")


def _show_tree(keys: list[Key], depth: int | None, *, is_chosen: bool) -> None:
    from pyckpt.tools.contents import Node

    root = Node.of(keys)
    automatic = depth is None and not is_chosen
    if automatic:
        depth = root.depth_of(_ROWS)
    rows = []
    above = [""]
    hidden = False
    for level, node in root.rows(depth):
        del above[level + 1 :]
        short = node.name.removeprefix(above[level]).removeprefix(".")
        above.append(node.name)
        label = "  " * level + short
        if node.key is not None:
            rows.append([label, *_columns(node.key)])
            continue
        is_cut = depth is not None and level + 1 >= depth
        hidden |= is_cut
        count = f"{node.count} values" if is_cut else ""
        rows.append([label, count, "", "", format_bytes(node.bytes), ""])
    print_table(_HEADINGS, rows, right=_RIGHT)
    if automatic and hidden:
        assert depth is not None
        say()
        say(f"{counted(len(keys), 'value')}; --depth {depth + 1} shows another level")


def _show_value(found: Contents, key: Key, numbers: dict[str, Statistics | str]) -> None:
    from pyckpt.tools import objects
    from pyckpt.tools.values import value

    print_table(_HEADINGS, [[key.name, *_columns(key)]], right=_RIGHT)
    saved = value(found.metadata, key.name)
    if key.kind == "object" and not found.is_here(saved.parts):
        say()
        say("it is on another node")
    elif key.kind == "object":
        from pyckpt.errors import UnsafeCheckpoint

        try:
            words = objects.describe(objects.load(found.path, key.name, saved.parts[0]))
        except UnsafeCheckpoint as error:
            words = f"contains {', '.join(error.refused)}, which is not loaded"
        say()
        say(words)
    rows = [
        [
            str(list(part.offsets)) if key.kind == "tensor" else "",
            str(list(part.sizes)) if key.kind == "tensor" else "",
            part.file,
            str(part.offset),
            str(part.length),
            "" if part.crc32 is None else f"{part.crc32:08x}",
        ]
        for part in saved.parts
    ]
    say()
    print_table(["begins at", "shape", "file", "offset", "bytes", "CRC-32"], rows, right="<<<>>")
    if numbers:
        say()
        _show_numbers([key], numbers)


def _show_numbers(keys: list[Key], numbers: dict[str, Statistics | str]) -> None:
    rows = []
    for key in keys:
        one = numbers.get(key.name)
        if one is None:
            continue
        columns = [key.name, key.dtype]
        if isinstance(one, str):
            rows.append([*columns, "", "", "", "", "", "", one])
            continue
        values = [one.min, one.max, one.mean, one.std]
        shown = ["" if value is None else f"{value:.6g}" for value in values]
        note = "" if key.elements_here is None else f"of {_here(key)}"
        rows.append([*columns, *shown, str(one.nan), str(one.inf), note])
    print_table(
        ["key", "dtype", "min", "max", "mean", "std", "NaN", "inf", ""], rows, right="<<>>>>>>"
    )


def _json(
    found: Contents,
    keys: list[Key],
    numbers: dict[str, Statistics | str],
    rank: int | None,
    *,
    parts: bool,
) -> dict[str, Any]:
    from pyckpt.tools.values import value

    saved = found.saved
    values: list[dict[str, Any]] = []
    for key in keys:
        entry = key._asdict()
        if key.elements_here is None:
            del entry["elements_here"]
        one = numbers.get(key.name)
        if isinstance(one, str):
            entry["no_statistics"] = one
        elif one is not None:
            entry["statistics"] = {
                "count": one.count,
                "nan": one.nan,
                "inf": one.inf,
                "min": finite(one.min),
                "max": finite(one.max),
                "mean": finite(one.mean),
                "std": finite(one.std),
            }
        if parts:
            entry["parts"] = [part._asdict() for part in value(found.metadata, key.name).parts]
        values.append(entry)
    return {
        "path": str(found.path),
        "saved": {
            "by": saved.by,
            "ranks": saved.ranks,
            "time": saved.time,
            "step": saved.step,
            "final": saved.final,
            "metrics": {name: finite(number) for name, number in saved.metrics.items()},
            "save_id": saved.save_id,
            "metadata_version": saved.version,
        },
        "rank": rank,
        "files": found.files,
        "elsewhere": sorted(found.elsewhere),
        "values": values,
    }
