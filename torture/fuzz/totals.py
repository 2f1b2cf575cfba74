"""What all runs have done together: ``torture/results/fuzz.json``, to which each run adds itself.

An hour of a processor for each parser is more than one run has. The totals are given for the last
run's code as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CODE", "totals"]

CODE = ("pyckpt", "csrc", "torture/fuzz")
"""What is fuzzed, and what fuzzes."""


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
