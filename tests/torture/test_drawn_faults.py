"""Which faults are tried: how they are drawn, and what a recording must have."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from _ranks import Pipe, run_child

from torture import kernel

pytestmark = [
    pytest.mark.slow,  # the scenarios import all of pyckpt
    pytest.mark.skipif(not kernel.supported(), reason="needs Linux on x86-64"),
]


def profile() -> dict[tuple[str, int], Sequence[object]]:
    """Many calls of one name, and few of another."""
    from torture.supervisor import Key

    keys = [Key(0, "newfstatat", f"file{n}", 1) for n in range(200)]
    return {
        ("next-save", 1): [*keys, Key(0, "rename", "a", 1)],
        ("dcp-save", 2): [*keys, Key(1, "pwrite64", "b", 1), Key(0, "rename", "b", 1)],
    }


@pytest.mark.parametrize("maker", ["singles", "pairs"])
def test_names_of_calls_are_drawn_evenly(maker: str) -> None:
    from torture import faults

    cases = list(itertools.islice(getattr(faults, maker)(profile(), random.Random(1)), 300))
    names = Counter(case.plan[0].key.name for case in cases)
    assert set(names) == {"newfstatat", "rename", "pwrite64"}
    # Of pairs some cannot be, and are drawn again.
    assert min(names.values()) >= (100 if maker == "singles" else 60)
    again = list(itertools.islice(getattr(faults, maker)(profile(), random.Random(1)), 300))
    assert [str(case) for case in again] == [str(case) for case in cases]


def test_parts_of_transfers_are_drawn_as_often_as_errors() -> None:
    from torture import faults

    cases = itertools.islice(faults.singles(profile(), random.Random(1)), 3000)
    kinds = Counter(
        case.plan[0].fault.kind for case in cases if case.plan[0].key.name == "pwrite64"
    )
    assert set(kinds) == {"kill", "error", "stays", "short", "delay"}
    assert kinds["short"] > kinds["delay"]


def test_a_sweep_has_each_fault_at_each_call_once() -> None:
    from torture import faults

    found = profile()
    count = sum(len(faults.faults_of(key.name)) for keys in found.values() for key in keys)
    cases = {str(case) for case in itertools.islice(faults.sweep(found, random.Random(1)), count)}
    assert len(cases) == count


def record(pipe: Pipe, place: Path, slot_bytes: int, makes: tuple[str, ...]) -> str:
    from torture import scenarios
    from torture.cases import Desk

    scenarios._ENGINE["slot_bytes"] = slot_bytes
    desk = Desk(place)
    try:
        desk.calls(replace(scenarios.SCENARIOS["dcp-save"], makes=makes), 1)
    except RuntimeError as error:
        return str(error)
    finally:
        desk.close()
    return ""


@pytest.mark.parametrize(
    ("slot_bytes", "makes", "lacks"),
    [
        (8 << 10, ("rename",), ""),
        (2 << 20, ("rename",), "dcp-save@1: no file has 3 calls of pwrite64, but 1"),
        (8 << 10, ("link",), "dcp-save@1: no link"),
    ],
)
def test_a_recording_without_what_is_to_be_tried_is_refused(
    slot_bytes: int, makes: tuple[str, ...], lacks: str, tmp_path: Path
) -> None:
    assert run_child(record, tmp_path, slot_bytes, makes) == lacks
