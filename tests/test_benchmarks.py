"""The benchmarks run to their end, on states too small to measure anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("save", ["large", "checksum"]),
        ("load", ["large", "verify"]),
        ("stall", ["large"]),
        ("checkpointer", []),  # all
    ],
)
def test_it_runs_to_its_end(tmp_path: Path, name: str, sections: list[str]) -> None:
    pytest.importorskip("rich")
    output = tmp_path / "results.json"
    script = BENCHMARKS / f"{name}.py"
    options = ["--quick", "--rounds", "1", "--size-mib", "16", "--output", output]
    options += [f"--only={section}" for section in sections]
    done = subprocess.run(
        [sys.executable, script, "--dir", tmp_path / "scratch", *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # which says that bytes were compared
    content = json.loads(output.read_text())
    assert not any(note.startswith("cut off") for note in content["notes"])
    assert content["results"]
    if content["machine"]["fio"] is not None:
        assert all(target["value"] is not None for target in content["targets"])
    assert list((tmp_path / "scratch").iterdir()) == []
