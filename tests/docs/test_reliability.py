"""The tables of docs/reliability.md are those of the results that are here."""

from __future__ import annotations

import json
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "reliability_tables.py"))


def test_the_page_has_the_tables_of_the_results() -> None:
    """If not: python scripts/reliability_tables.py."""
    page = SCRIPT["PAGE"].read_text()
    assert SCRIPT["made"](page) == page
    assert sorted(re.findall(r"<!-- table: (\w+) -->", page)) == sorted(SCRIPT["TABLES"])


def test_each_result_has_a_row_or_a_table() -> None:
    told = {name for _, name, _, _ in SCRIPT["RUNS"]} | {"peers"}
    assert {path.stem for path in SCRIPT["RESULTS"].glob("*.json")} <= told


def test_what_was_not_run_says_so(tmp_path: Path) -> None:
    names = SCRIPT["runs"].__globals__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(names, "RESULTS", tmp_path)
        assert SCRIPT["runs"]().count("not run yet") == len(SCRIPT["RUNS"])
        assert "Not run yet: `python -m torture.peers`" in SCRIPT["peers"]()
        content = {
            "date": "2000-01-02T03:04:05",
            "commit": "0123456789",
            "changed": True,
            "kills": 1,
            "restarts": 2,
            "ranks": 3,
            "steps": 4,
            "wrong": ["one", "two"],
        }
        (tmp_path / "restarts.json").write_text(json.dumps(content))
        (row,) = [row for row in SCRIPT["runs"]().splitlines() if "make restarts" in row]
        assert (
            "| 2000-01-02, 0123456, changed | 1 kill, 2 restarts of 3 ranks, 4 steps | 2 |" in row
        )


def test_a_cell_counts_what_ended_badly() -> None:
    cell = SCRIPT["_cell"]
    assert cell(Counter(told=3, done=1)) == "0 of 4"
    assert cell(Counter({"told": 3, "trap": 1, "hang": 2})) == "**3** of 6: 1 trap, 2 hang"
    assert cell(None) == "not tried"
