"""The comparison finds defects that are planted, and judges all by the same rules."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from torture import kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not kernel.supported(), reason="needs Linux on x86-64"),
]


def to_temporary(tree: Any, path: Path) -> None:
    torch.save(tree, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def in_place(tree: Any, path: Path) -> None:
    torch.save(tree, path)


def swallowing(tree: Any, path: Path) -> None:
    with suppress(OSError, RuntimeError):
        to_temporary(tree, path)


def removing_first(tree: Any, path: Path) -> None:
    path.unlink(missing_ok=True)
    to_temporary(tree, path)


def outcome(place: Path, save: Callable[[Any, Path], None], situation: str, fault: str) -> str:
    """What becomes of a fault in a save, or in a load of what it has saved."""
    from torture import peers
    from torture.peer_systems import SYSTEMS, System, _torch_load, _torch_look
    from torture.supervisor import parse

    def prepared(job: Any, step: int, value: float) -> Callable[[], None]:
        tree = job.tree(value)
        return lambda: save(tree, job.root / f"step-{step}.pt")

    system = System(
        "planted",
        "torch",
        prepared,
        _torch_load,
        _torch_look,
        Path.exists,
        path=lambda root, step: root / f"step-{step}.pt",
    )
    bench = peers.Bench(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SYSTEMS, "planted", system)
        try:
            cell = peers.Cell("planted", situation, 1)
            if situation == "flip":
                ((name, bits),) = bench.bits(cell)
                line = bench.run_flip(cell, (name, bits // 2))
            else:
                line = bench.run_case(cell, parse(fault))
        finally:
            bench.close()
    assert line["hit"]
    return str(line["outcome"])


@pytest.mark.parametrize(
    ("save", "situation", "fault", "right"),
    [
        (to_temporary, "next", "0:rename:step-2.tmp:1=error=EIO", "told"),
        (to_temporary, "next", "0:rename:step-2.tmp:1=kill", "told"),
        (to_temporary, "overwrite", "0:rename:step-1.tmp:1=kill", "told"),
        (to_temporary, "load", "0:read:step-1.pt:2=kill", "told"),
        (to_temporary, "flip", "", "wrong values"),
        (in_place, "next", "0:write:step-2.pt:1=error=EINTR", "done"),
        (in_place, "first", "0:write:step-2.pt:1=kill", "trap"),
        (in_place, "overwrite", "0:write:step-1.pt:1=kill", "damage"),
        (removing_first, "overwrite", "0:rename:step-1.tmp:1=error=EIO", "damage"),
        (swallowing, "next", "0:rename:step-2.tmp:1=error=EIO", "silent loss"),
    ],
)
def test_what_becomes_of_a_fault(
    tmp_path: Path, save: Callable[[Any, Path], None], situation: str, fault: str, right: str
) -> None:
    assert outcome(tmp_path, save, situation, fault) == right


def test_what_was_told_decides_between_trap_and_silent_loss() -> None:
    from torture.peers import classify
    from torture.scenarios import NEW, OLD
    from torture.supervisor import Seen

    ok, error = Seen("said", ("ok", None)), Seen("said", ("error", ("OSError", 5, [], "")))
    old, new, broken, none = ("value", OLD), ("value", NEW), ("error", "cut off"), ("none", None)
    assert classify("next", [ok, ok], old, broken) == "silent loss"
    assert classify("next", [ok, error], old, broken) == "trap"
    assert classify("next", [ok, error], old, none) == "told"
    assert classify("next", [ok, Seen("killed")], old, new) == "told"
    assert classify("next", [ok, Seen("hung")], old, new) == "hang"
    assert classify("next", [ok, ok], ("value", NEW), new) == "wrong values"
    assert classify("next", [ok, ok], broken, new) == "damage"
    assert classify("overwrite", [ok, ok], old, old) == "silent loss"
    assert classify("overwrite", [error, error], new, new) == "told"
    assert classify("load", [Seen("said", ("ok", 0))], old, none) == "wrong values"


def test_counts_are_of_rounds_in_which_every_cell_was_hit() -> None:
    from torture import peers

    def line(cell: Any, number: int, hit: bool = True) -> dict[str, Any]:
        more = {"outcome": "told", "seconds": 1.0, "kind": "kill"} if hit else {}
        return {"cell": list(cell), "round": number, "hit": hit, "case": "", **more}

    lines = [line(cell, 0) for cell in peers.cells()]
    lines += [line(cell, 1) for cell in peers.cells()[:-1]]
    lines += [line(peers.cells()[0], 0, hit=False)]
    found = peers.summed(lines)
    assert found["rounds"] == 1
    assert found["verified"] == len(peers.cells())
    assert {cell["verified"] for cell in found["cells"]} == {1}
