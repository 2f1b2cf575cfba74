"""What all runs have done together: ``torture/results/fuzz.json``, to which each run adds itself.

An hour of a processor for each parser is more than one run has. The code may change between two
runs, so each says by which code it ran, and the totals are given for the last run's code as well.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torture.results import ROOT

__all__ = ["added", "code", "next_seed", "runs_in", "totals"]

_CODE = ("pyckpt", "csrc", "torture/fuzz")


def code() -> str:
    """Names the contents of what is fuzzed, and of what fuzzes, as committed. It stays the same
    where a commit is made again on another one, as a rebase does."""
    command = ["git", "-C", str(ROOT), "rev-parse", *(f"HEAD:{folder}" for folder in _CODE)]
    done = subprocess.run(command, capture_output=True, text=True)
    return "-".join(tree[:10] for tree in done.stdout.split()) if done.returncode == 0 else ""


def runs_in(path: Path) -> list[dict[str, Any]]:
    """The runs that a result is made of; none if there is no result."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text()).get("runs", [])
    return found


def next_seed(runs: Sequence[Mapping[str, Any]]) -> int:
    """One that no run had: it tries other inputs."""
    return 1 + max((int(run["seed"]) for run in runs), default=0)


def added(runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs, with one more. A run of the same seed and code tried the same inputs: the new one
    takes its place."""

    def which(one: Mapping[str, Any]) -> tuple[Any, ...]:
        return one["seed"], one["code"], one["guided"]

    return [*(one for one in runs if which(one) != which(run)), run]


def totals(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For each parser the sums over all runs, and the seconds by the code of the last one."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name, one in run["parsers"].items():
            mine = found.setdefault(
                name, {"executions": 0, "cpu_seconds": 0.0, "by_this_code": 0.0, "findings": 0}
            )
            mine["executions"] += one["executions"]
            mine["cpu_seconds"] = round(mine["cpu_seconds"] + one["cpu_seconds"], 1)
            mine["findings"] += len(one["findings"])
            if run["code"] == runs[-1]["code"] and not run["changed"]:
                mine["by_this_code"] = round(mine["by_this_code"] + one["cpu_seconds"], 1)
    return found
