"""The benchmark of frameworks runs to its end, on states too small to measure anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "frameworks.py"


def test_it_runs_to_its_end(tmp_path: Path) -> None:
    """Where it compares what a resumed job computes with what the job that saved did."""
    for package in ("rich", "lightning", "transformers", "accelerate", "torchtitan"):
        pytest.importorskip(package)
    output = tmp_path / "results.json"
    # Relative, as one types it.
    options = ["--dir", "scratch", "--rounds", "1", "--size-mib", "4", "--output", output]
    done = subprocess.run(
        [sys.executable, SCRIPT, *options], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(output.read_text())
    assert not any(note.startswith("cut off") for note in content["notes"])
    measured = {name.partition(":")[0] for name in content["results"]}
    assert len(measured) == 5, measured
    assert len(content["targets"]) == 4 * len(measured)  # at this size some are below the noise
    assert list((tmp_path / "scratch").iterdir()) == []
