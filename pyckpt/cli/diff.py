"""``pyckpt diff``: how two checkpoints differ."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyckpt.cli.output import (
    BAD,
    AsJson,
    counted,
    damage_is_bad,
    finite,
    format_bytes,
    print_json,
    print_table,
    progress_bar,
    say,
)

if TYPE_CHECKING:
    from pyckpt.tools.comparing import Comparison, Difference

__all__ = ["diff"]


def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint's directory, or URL.")],
    b: Annotated[str, typer.Argument(help="Another's.")],
    key: Annotated[
        str | None,
        typer.Option(help="Compare this key, those below it, or a pattern such as '*.weight'."),
    ] = None,
    atol: Annotated[float, typer.Option(min=0.0, help="A difference that does not count.")] = 0.0,
    rtol: Annotated[
        float, typer.Option(min=0.0, help="The same, as a part of the value in B.")
    ] = 0.0,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Compare keys, shapes and dtypes only.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes and values, whatever their shards.

    The answer is bad (exit status 1) if they differ by more than the tolerances allow, or if
    either is damaged.
    """
    from pyckpt.tools.comparing import compare

    with damage_is_bad(), progress_bar("comparing") as progress:
        found = compare(
            a, b, pattern=key, atol=atol, rtol=rtol, only_metadata=metadata, progress=progress
        )
    if as_json:
        print_json(_json(found))
    else:
        _show(found, metadata=metadata)
    if not found.good:
        raise typer.Exit(BAD)


def _show(found: Comparison, *, metadata: bool) -> None:
    if found.differences:
        print_table(
            ["key", "", "A", "B", "differ", "max abs", "max rel", "NaN in A", "in B"],
            [_row(one) for one in found.differences],
            right="<<<<>>>>>",
        )
        say()
    for one in found.differences:
        if one.why:
            say(f"{one.key}: {one.why}")
    what = "alike in shape and dtype" if metadata else "equal"
    read = "" if metadata else f" ({format_bytes(found.bytes)} compared)"
    differ = len(found.differences)
    say(f"{what}: {counted(found.equal, 'value')}; different: {differ}{read}")


def _row(one: Difference) -> list[str]:
    if not one.count:
        return [one.key, one.kind, one.a, one.b, "", "", "", "", ""]
    return [
        one.key,
        one.kind,
        one.a,
        one.b,
        f"{one.different} of {one.count}",
        f"{one.max_abs:.3g}",
        f"{one.max_rel:.3g}",
        str(one.nan_a or ""),
        str(one.nan_b or ""),
    ]


def _json(found: Comparison) -> dict[str, Any]:
    return {
        "a": str(found.a.path),
        "b": str(found.b.path),
        "good": found.good,
        "equal": found.equal,
        "bytes": found.bytes,
        "differences": [
            {**asdict(one), "max_abs": finite(one.max_abs), "max_rel": finite(one.max_rel)}
            for one in found.differences
        ],
    }
