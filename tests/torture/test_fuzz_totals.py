"""Runs of the fuzzers add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torture.adding_up import added, next_seed, runs_in, summed
from torture.fuzz.totals import totals


def run(
    seed: int, code: str = "c", *, seconds: float = 2.0, changed: bool = False
) -> dict[str, Any]:
    parsers = {"note": {"executions": 10, "cpu_seconds": seconds, "findings": ["a"]}}
    return {"seed": seed, "code": code, "guided": False, "changed": changed, "parsers": parsers}


def test_a_run_adds_to_those_before_it(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    assert runs_in(path) == []
    path.write_text(json.dumps({"runs": added([run(1, "before")], run(2))}))
    runs = runs_in(path)
    assert [one["seed"] for one in runs] == [1, 2]
    assert next_seed(runs) == 3
    assert totals(runs) == {
        "note": {"executions": 20, "cpu_seconds": 4.0, "by_this_code": 2.0, "findings": 2}
    }


def test_the_same_inputs_count_once() -> None:
    runs = added([run(1), run(2)], run(1, seconds=5.0))
    assert [one["seed"] for one in runs] == [2, 1]
    assert totals(runs)["note"]["cpu_seconds"] == 7.0


def test_what_ran_with_changes_is_of_no_code() -> None:
    assert totals([run(1, changed=True), run(2)])["note"]["by_this_code"] == 2.0


def test_another_kind_of_run_of_the_same_seed_counts_too() -> None:
    guided = {**run(1), "guided": True}
    assert len(added([run(1)], guided, ("seed", "code", "guided"))) == 2
    assert len(added([run(1)], guided)) == 1


def test_numbers_add_up_key_by_key() -> None:
    one = {"verified": 3, "faults": {"kill": 2, "delay": 1}}
    two = {"verified": 4, "faults": {"delay": 2, "short": 1}}
    assert summed([one, two]) == {"verified": 7, "faults": {"delay": 3, "kill": 2, "short": 1}}
    assert summed([]) == {}
